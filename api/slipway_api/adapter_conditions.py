"""Condition types, reasons and events of a LoRAAdapter, with their meanings for documentation and tests."""

from enum import StrEnum
from typing import Final

from slipway_api.conditions import ConditionStatus

_TRUE, _FALSE, _UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN


class AdapterCondition(StrEnum):
    """The conditions of an adapter. Reconciling and Stalled are present only while they are True (kstatus)."""

    READY = "Ready"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"
    SOURCE_RESOLVED = "SourceResolved"
    LOADED = "Loaded"


class AdapterReason(StrEnum):
    """Why a condition of an adapter has its status."""

    LOADED = "Loaded"
    PARTIALLY_LOADED = "PartiallyLoaded"
    LOADING = "Loading"
    RESOLVED = "Resolved"
    NO_READY_PODS = "NoReadyPods"
    BASE_NOT_FOUND = "BaseNotFound"
    BASE_SCALED_TO_ZERO = "BaseScaledToZero"
    DOWNLOAD_FAILED = "DownloadFailed"
    DIGEST_MISMATCH = "DigestMismatch"
    CREDENTIALS_INVALID = "CredentialsInvalid"
    RANK_TOO_LARGE = "RankTooLarge"
    CAPACITY_EXCEEDED = "CapacityExceeded"
    NAME_CONFLICT = "NameConflict"
    ENGINE_REJECTED = "EngineRejected"
    ON_DEMAND = "OnDemand"


class AdapterEvent(StrEnum):
    """Why an event about an adapter is posted; `type` says whether it is a warning."""

    ADAPTER_DOWNLOADED = "AdapterDownloaded"
    ADAPTER_LOADED = "AdapterLoaded"
    ADAPTER_SWAPPED = "AdapterSwapped"
    ADAPTER_UNLOADED = "AdapterUnloaded"
    ADAPTER_EVICTED = "AdapterEvicted"
    ADAPTER_LOAD_FAILED = "AdapterLoadFailed"
    NAME_CONFLICT = "NameConflict"

    @property
    def type(self) -> str:
        """`Normal` or `Warning`, the types of events.k8s.io/v1."""
        return "Warning" if self in (AdapterEvent.ADAPTER_LOAD_FAILED, AdapterEvent.NAME_CONFLICT) else "Normal"


# Causes that repeating the load does not remove: they hold until the adapter, its Secret or its base is changed.
FINAL_REASONS: Final = frozenset(
    {
        AdapterReason.DIGEST_MISMATCH,
        AdapterReason.RANK_TOO_LARGE,
        AdapterReason.CAPACITY_EXCEEDED,
        AdapterReason.ENGINE_REJECTED,
    }
)

FAILURE_MEANINGS: Final = {
    AdapterReason.DOWNLOAD_FAILED: "The files cannot be had from spec.source.uri.",
    AdapterReason.DIGEST_MISMATCH: "The files have another digest than spec.source.digest.",
    AdapterReason.CREDENTIALS_INVALID: "The Secret is missing or may not be read, or the source refuses it.",
    AdapterReason.RANK_TOO_LARGE: "The adapter's rank is above spec.runtime.lora.maxRank of the base.",
    AdapterReason.CAPACITY_EXCEEDED: "The base has no room for adapters, or none of this size.",
    AdapterReason.ENGINE_REJECTED: "The engine refuses the adapter, or a request for it failed.",
}

_MEANINGS: Final = {
    AdapterCondition.READY: (
        (_TRUE, AdapterReason.LOADED, "Every chosen replica answers requests for it."),
        (_TRUE, AdapterReason.PARTIALLY_LOADED, "Some chosen replicas answer requests for it."),
        (_TRUE, AdapterReason.BASE_SCALED_TO_ZERO, "The base has no replicas now; the next ones load it."),
        (_TRUE, AdapterReason.ON_DEMAND, "No replica has it now; the next request for it loads it."),
        (_UNKNOWN, AdapterReason.LOADING, "Replicas load it for the first time."),
        (_FALSE, AdapterReason.NO_READY_PODS, "No replica of the base is ready."),
        (_FALSE, AdapterReason.BASE_NOT_FOUND, "No InferenceService has the name in spec.baseRef."),
        (_FALSE, AdapterReason.NAME_CONFLICT, "An older adapter or service has the name."),
        *((_FALSE, reason, meaning) for reason, meaning in FAILURE_MEANINGS.items()),
    ),
    AdapterCondition.STALLED: (
        (_TRUE, AdapterReason.NAME_CONFLICT, "An older adapter or service has the name."),
        *((_TRUE, reason, meaning) for reason, meaning in FAILURE_MEANINGS.items()),
    ),
    AdapterCondition.RECONCILING: ((_TRUE, AdapterReason.LOADING, "Replicas load it, or drop it."),),
    AdapterCondition.SOURCE_RESOLVED: (
        (_TRUE, AdapterReason.RESOLVED, "A replica has the files; status.resolvedDigest names them."),
        (_UNKNOWN, AdapterReason.LOADING, "No replica has fetched the files yet."),
        *(
            (_FALSE, reason, FAILURE_MEANINGS[reason])
            for reason in (
                AdapterReason.DOWNLOAD_FAILED,
                AdapterReason.DIGEST_MISMATCH,
                AdapterReason.CREDENTIALS_INVALID,
            )
        ),
    ),
    AdapterCondition.LOADED: (
        (_TRUE, AdapterReason.LOADED, "As many replicas have it as spec.placement asks for."),
        (_FALSE, AdapterReason.PARTIALLY_LOADED, "Some replicas that should have it do not."),
        (_FALSE, AdapterReason.LOADING, "No replica has it yet."),
        (_FALSE, AdapterReason.NO_READY_PODS, "No replica of the base is ready."),
        (_FALSE, AdapterReason.ON_DEMAND, "No replica has it now; the next request for it loads it."),
    ),
}

CONDITIONS: Final = tuple((type, *row) for type, rows in _MEANINGS.items() for row in rows)

EVENTS: Final = {
    AdapterEvent.ADAPTER_DOWNLOADED: "The first replica has fetched its files; their size, rank and digest.",
    AdapterEvent.ADAPTER_LOADED: "All chosen replicas answer requests for it; how many, and after how long.",
    AdapterEvent.ADAPTER_SWAPPED: "All chosen replicas answer with the new source.",
    AdapterEvent.ADAPTER_UNLOADED: "Replicas dropped it; why.",
    AdapterEvent.ADAPTER_EVICTED: "A replica drops it to make room (mode OnDemand); how many it has, how idle it was.",
    AdapterEvent.ADAPTER_LOAD_FAILED: "A replica could not load it; the cause, and when it is tried again.",
    AdapterEvent.NAME_CONFLICT: "An older adapter or service has the name.",
}


def vocabulary_section() -> str:
    """The part of the reference page that lists conditions and events."""
    return "\n".join(
        [
            "## Conditions",
            "",
            "Reconciling and Stalled are present only while they are True (kstatus). The message names the cause.",
            "",
            "| condition | status | reason | meaning |",
            "|---|---|---|---|",
            *(f"| {kind} | {status} | {reason} | {meaning} |" for kind, status, reason, meaning in CONDITIONS),
            "",
            "## Events",
            "",
            "| type | reason | what it tells |",
            "|---|---|---|",
            *(f"| {reason.type} | {reason} | {meaning} |" for reason, meaning in EVENTS.items()),
            "",
        ]
    )
