"""Condition types, reasons and events of a LoRAAdapter, with their meanings for documentation and tests."""

from enum import StrEnum
from typing import Final

from slipway_api.causes import Cause, Helper, Row, condition_table
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
    REFUSED = "Refused"
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
    BASE_NOT_FOUND = "BaseNotFound"
    CAPACITY_EXCEEDED = "CapacityExceeded"
    REFUSED = "Refused"

    @property
    def type(self) -> str:
        """`Normal` or `Warning`, the types of events.k8s.io/v1."""
        return "Warning" if self in _WARNINGS else "Normal"


_WARNINGS: Final = frozenset(
    {AdapterEvent.ADAPTER_LOAD_FAILED, AdapterEvent.NAME_CONFLICT, AdapterEvent.BASE_NOT_FOUND}
    | {AdapterEvent.CAPACITY_EXCEEDED, AdapterEvent.REFUSED}
)


# Causes that repeating the load does not remove: they hold until the adapter, its Secret or its base is changed.
FINAL_REASONS: Final = frozenset(
    {
        AdapterReason.DIGEST_MISMATCH,
        AdapterReason.RANK_TOO_LARGE,
        AdapterReason.CAPACITY_EXCEEDED,
        AdapterReason.ENGINE_REJECTED,
    }
)

FAILURE_CAUSES: Final = {
    AdapterReason.DOWNLOAD_FAILED: Cause(
        "The files cannot be had from spec.source.uri.",
        Helper.AUTHOR,
        "Check spec.source.uri, and the network of the nodes.",
    ),
    AdapterReason.DIGEST_MISMATCH: Cause(
        "The files have another digest than spec.source.digest.",
        Helper.AUTHOR,
        "Correct spec.source.digest, or restore the files.",
    ),
    AdapterReason.CREDENTIALS_INVALID: Cause(
        "The Secret is missing or may not be read, or the source refuses it.",
        Helper.AUTHOR,
        "Create the Secret of spec.source.credentialsSecretRef with a key that the source accepts.",
    ),
    AdapterReason.RANK_TOO_LARGE: Cause(
        "The adapter's rank is above spec.runtime.lora.maxRank of the base.",
        Helper.AUTHOR,
        "Raise spec.runtime.lora.maxRank of the InferenceService.",
    ),
    AdapterReason.CAPACITY_EXCEEDED: Cause(
        "The base has no room for adapters, for adapters of experts, or for one of this size.",
        Helper.AUTHOR,
        "Set or raise spec.runtime.lora of the InferenceService; for adapters of experts, spec.runtime.lora.experts.",
    ),
    AdapterReason.ENGINE_REJECTED: Cause(
        "The engine refuses the adapter, or a request for it failed.",
        Helper.AUTHOR,
        "Correct the files that the message names: the adapter has to fit its base.",
    ),
}
BASE_NOT_FOUND: Final = Cause(
    "No InferenceService has the name in spec.baseRef.",
    Helper.AUTHOR,
    "Create the InferenceService, or correct spec.baseRef.name.",
)
NAME_CONFLICT: Final = Cause(
    "An older adapter or service has the name.", Helper.OTHER_OWNER, "Give one of the two objects another name."
)
REFUSED: Final = Cause(
    "The API server refuses a write for this adapter; the message has its sentence.",
    Helper.CLUSTER,
    "Grant the right, or change the policy or webhook that the message names.",
)

# Stalled=True has one of these.
STALLED_CAUSES: Final = {
    AdapterReason.NAME_CONFLICT: NAME_CONFLICT,
    AdapterReason.BASE_NOT_FOUND: BASE_NOT_FOUND,
    AdapterReason.REFUSED: REFUSED,
    **FAILURE_CAUSES,
}

# Causes other than a failed load: their event has the reason of the condition.
_STALLED_EVENTS: Final = (
    *(AdapterReason.NAME_CONFLICT, AdapterReason.BASE_NOT_FOUND, AdapterReason.CAPACITY_EXCEEDED),
    AdapterReason.REFUSED,
)

_SOURCE_REASONS: Final = (
    AdapterReason.DOWNLOAD_FAILED,
    AdapterReason.DIGEST_MISMATCH,
    AdapterReason.CREDENTIALS_INVALID,
)

_CAUSES: Final[dict[AdapterCondition, tuple[tuple[ConditionStatus, AdapterReason, Cause], ...]]] = {
    AdapterCondition.READY: (
        (_TRUE, AdapterReason.LOADED, Cause("Every chosen replica answers requests for it.")),
        (_TRUE, AdapterReason.PARTIALLY_LOADED, Cause("Some chosen replicas answer requests for it.")),
        (_TRUE, AdapterReason.BASE_SCALED_TO_ZERO, Cause("The base has no replicas now; the next ones load it.")),
        (_TRUE, AdapterReason.ON_DEMAND, Cause("No replica has it now; the next request for it loads it.")),
        (_UNKNOWN, AdapterReason.LOADING, Cause("Replicas load it for the first time.")),
        (_FALSE, AdapterReason.NO_READY_PODS, Cause("No replica of the base is ready.")),
        *((_FALSE, reason, cause) for reason, cause in STALLED_CAUSES.items()),
    ),
    AdapterCondition.STALLED: tuple((_TRUE, reason, cause) for reason, cause in STALLED_CAUSES.items()),
    AdapterCondition.RECONCILING: ((_TRUE, AdapterReason.LOADING, Cause("Replicas load it, or drop it.")),),
    AdapterCondition.SOURCE_RESOLVED: (
        (_TRUE, AdapterReason.RESOLVED, Cause("A replica has the files; status.resolvedDigest names them.")),
        (_UNKNOWN, AdapterReason.LOADING, Cause("No replica has fetched the files yet.")),
        *((_FALSE, reason, FAILURE_CAUSES[reason]) for reason in _SOURCE_REASONS),
    ),
    AdapterCondition.LOADED: (
        (_TRUE, AdapterReason.LOADED, Cause("As many replicas have it as spec.placement asks for.")),
        (_FALSE, AdapterReason.PARTIALLY_LOADED, Cause("Some replicas that should have it do not.")),
        (_FALSE, AdapterReason.LOADING, Cause("No replica has it yet.")),
        (_FALSE, AdapterReason.NO_READY_PODS, Cause("No replica of the base is ready.")),
        (_FALSE, AdapterReason.ON_DEMAND, Cause("No replica has it now; the next request for it loads it.")),
    ),
}

CONDITIONS: Final = tuple(Row(type, *row) for type, rows in _CAUSES.items() for row in rows)

EVENTS: Final = {
    AdapterEvent.ADAPTER_DOWNLOADED: "The first replica has fetched its files; their size, rank and digest.",
    AdapterEvent.ADAPTER_LOADED: "All chosen replicas answer requests for it; how many, and after how long.",
    AdapterEvent.ADAPTER_SWAPPED: "All chosen replicas answer with the new source.",
    AdapterEvent.ADAPTER_UNLOADED: "Replicas dropped it; why.",
    AdapterEvent.ADAPTER_EVICTED: "A replica drops it to make room (mode OnDemand); how many it has, how idle it was.",
    AdapterEvent.ADAPTER_LOAD_FAILED: "A replica could not load it; the cause, and when it is tried again.",
    **{AdapterEvent(one.value): STALLED_CAUSES[one].meaning for one in _STALLED_EVENTS},
}


def vocabulary_section() -> str:
    """The part of the reference page that lists conditions and events."""
    return "\n".join(
        [
            "## Conditions",
            "",
            "Reconciling and Stalled are present only while they are True (kstatus). The message names the cause.",
            "",
            *condition_table(CONDITIONS),
            "",
            "## Events",
            "",
            "| type | reason | what it tells |",
            "|---|---|---|",
            *(f"| {reason.type} | {reason} | {meaning} |" for reason, meaning in EVENTS.items()),
            "",
        ]
    )
