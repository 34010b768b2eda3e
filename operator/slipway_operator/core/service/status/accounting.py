"""Accounts for the requests and GPUs of one service: service levels (`slo_status`) and cost (`cost`). Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Final

from slipway_api.slo import CostStatus, SLOStatus
from slipway_operator.core.health import Member
from slipway_operator.core.observed import AccountingMemory, Observed, Outcomes, ServiceOutcomes
from slipway_operator.core.service.status.cost import Cost, add_mark, cost_status, held_gpus, measure_cost
from slipway_operator.core.service.status.slo_status import ServiceLevels, SLOCondition, minus, record

LOOK_EVERY: Final = timedelta(seconds=60)  # requests that end wake nobody
NONE_COUNTED: Final = Outcomes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """What a pass found."""

    slo: SLOStatus | None = None
    cost: CostStatus | None = None
    condition: SLOCondition | None = None
    """WithinSLO; None: the spec has no objectives."""
    levels: ServiceLevels | None = None
    measured_cost: Cost | None = None
    counted: Outcomes = NONE_COUNTED
    """All requests since this leader began."""
    memory: AccountingMemory = field(default_factory=AccountingMemory)
    again_at: datetime | None = None


NOT_ACCOUNTED: Final = Accounting()


def account(observed: Observed, members: Sequence[Member], now: datetime) -> Accounting:
    """Account for the requests and the GPUs of a service; nothing where its spec asks for neither."""
    service, memory = observed.service, observed.accounting_memory
    slo, budget = service.spec.slo, service.spec.budget
    has_price = budget is not None and budget.gpu_hour_cost is not None and service.spec.resources.gpu.count > 0
    if slo is None and not has_price:
        return NOT_ACCOUNTED
    outcomes = observed.service_outcomes
    counted = outcomes.total if outcomes is not None else NONE_COUNTED
    memory = _begin(memory, observed, outcomes)
    if not any(one.served for one in service.status.revisions):
        # Before its first start is complete a service promises nothing.
        memory = replace(memory, recorded=((memory.recorded[-1][0], counted),), objectives_from=now)
    recording = record(slo, observed, counted, memory, now) if slo is not None else None
    gpus = held_gpus(service, members)
    marks = add_mark(
        memory.marks,
        gpus=memory.gpus,
        output_tokens=minus(counted, memory.counted).output_tokens,
        before=memory.at,
        now=now,
    )
    cost = measure_cost(service, marks, gpus)
    before = service.status.cost
    status = cost_status(before, cost, memory.cost_written, now)
    was, after = (
        before.per_million_output_tokens if before else None,
        status.per_million_output_tokens if status else None,
    )
    memory = replace(
        memory,
        recorded=recording.recorded if recording is not None else memory.recorded,
        counted=counted,
        at=now,
        gpus=gpus,
        marks=marks,
        cost_written=now if was != after else memory.cost_written,
    )
    return Accounting(
        slo=recording.status if recording is not None else None,
        cost=status,
        condition=recording.condition if recording is not None else None,
        levels=recording.levels if recording is not None else None,
        measured_cost=cost,
        counted=counted,
        memory=memory,
        again_at=now + LOOK_EVERY,
    )


def _begin(memory: AccountingMemory, observed: Observed, outcomes: ServiceOutcomes | None) -> AccountingMemory:
    """The memory for these counters: they begin at nothing with a new leader, and after hours without requests."""
    known = observed.service.status.slo.recorded_time if observed.service.status.slo is not None else None
    began = outcomes.began if outcomes is not None else None
    if memory.recorded and memory.began == began:
        return memory
    nothing = NONE_COUNTED
    if outcomes is not None and not memory.recorded:
        created = observed.service.metadata.creation_timestamp
        # A service that was deleted and made again under the same name does not inherit what the first one did.
        if created is not None and outcomes.began < created:
            nothing = outcomes.total
    return replace(memory, began=began, recorded=((known, nothing),), counted=nothing)
