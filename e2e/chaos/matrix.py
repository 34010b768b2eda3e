"""Runs faults one after the other under load, and prints their effects on clients and on the cluster."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rich.table import Table

from e2e import checks
from e2e.chaos.client import Counts, Load, References
from e2e.chaos.faults import Fault
from e2e.chaos.stage import Stage

USERS = 8
WARM_REQUESTS = 8  # finished before a fault is injected: streams are running
WARM_SECONDS = 60.0
FIRST_BYTE_SECONDS = 15.0  # the longest wait while a healthy replica is available (ADR 151)


@dataclass
class Row:
    """The effects of one fault."""

    fault: str
    counts: Counts = field(default_factory=Counts)
    recovery_seconds: float | None = None  # from the end of the fault until all replicas serve; None: not in time
    violations: list[str] = field(default_factory=list)  # double slots, orphans
    may_lose: bool = False
    may_wait: bool = False
    notes: list[str] = field(default_factory=list)  # what the fault measured
    error: str = ""  # why the fault could not be injected, or what did not recover

    @property
    def is_bad(self) -> bool:
        """Whether the matrix fails because of this row."""
        return bool(self.counts.wrong or self.counts.cut or self.violations or self.error or self.broken_limits())

    def broken_limits(self) -> list[str]:
        """Requests that failed although the fault breaks no connection of a client, and first bytes that were late."""
        failed, first_byte = self.counts.failed, self.counts.first_byte_seconds
        lost = [f"{failed} requests lost"] if failed and not self.may_lose else []
        late = [f"a first byte after {first_byte:.1f} s, above {FIRST_BYTE_SECONDS:.0f} s"]
        return lost + (late if first_byte > FIRST_BYTE_SECONDS and not self.may_wait else [])


def run_fault(stage: Stage, fault: Fault, references: References, seed: int) -> Row:
    """Inject one fault under load, wait for recovery, and repair what the fault left broken."""
    row = Row(fault.name, may_lose=fault.may_lose, may_wait=fault.may_wait)
    try:
        fault.prepare(stage)
        if fault.on_node:
            stage.spread()
    except Exception as error:  # noqa: BLE001  the other faults still run; the row has the reason
        row.error = f"nothing was injected: {first_line(error)}"
        return row
    load = Load(stage.slipway.base_url, references, USERS, seed)
    stage.counts, stage.notes = load.counts, row.notes
    try:
        wait_steady(load.counts)
        fault.inject(stage)
        row.recovery_seconds = stage.wait_settled()
    except Exception as error:  # noqa: BLE001  the other faults still run; the row has the reason
        row.error = first_line(error)
    row.counts = load.stop()
    try:
        checks.mend(stage.cluster, stage.slipway)
        row.violations = stage.violations()
        if row.error or fault.prepare is not Stage.configure:
            stage.prepare()  # the next fault begins from the same state
    except Exception as error:  # noqa: BLE001  as above
        row.error = f"{row.error}; not mended: {first_line(error)}".removeprefix("; ")
    return row


def first_line(error: Exception) -> str:
    """Class and first line of an error."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def wait_steady(counts: Counts) -> None:
    """Wait until the load has finished some requests; raise where it does not."""
    deadline = time.monotonic() + WARM_SECONDS
    while counts.finished < WARM_REQUESTS:
        if time.monotonic() > deadline:
            raise AssertionError(f"the load does not run: {counts}")
        time.sleep(0.1)


def run_matrix(stage: Stage, faults: Sequence[Fault], references: References, *, until: float) -> Iterator[Row]:
    """Run faults until the monotonic time `until`; those that are left out then are rows with an error."""
    for number, fault in enumerate(faults):
        if time.monotonic() > until:
            yield Row(fault.name, error="not run: the time is up")
        else:
            yield run_fault(stage, fault, references, seed=number)


def sentence(row: Row) -> str:
    """One line about one fault, as it is printed while the matrix runs."""
    counts = row.counts
    recovery = "not recovered" if row.recovery_seconds is None else f"recovered in {row.recovery_seconds:.1f} s"
    parts = [
        f"{row.fault}: {counts.sent} sent, {counts.finished} finished, {counts.failed} failed",
        f"{counts.failed_first} failed first attempts, {counts.wrong} wrong, {counts.cut} cut",
        f"{recovery}, slowest request {counts.slowest_seconds:.1f} s",
        f"longest wait for a first byte {counts.first_byte_seconds:.1f} s, in a stream {counts.pause_seconds:.1f} s",
        *failed_attempts(counts),
        *row.notes,
        *row.violations,
        *row.broken_limits(),
        row.error,
    ]
    return "; ".join(part for part in parts if part)


def failed_attempts(counts: Counts) -> list[str]:
    """The most frequent failures of attempts, those of retries included, so they may be more than failed requests."""
    return [f"{count} × {reason}" for reason, count in counts.reasons.most_common(5)]


def table(rows: Iterable[Row]) -> Table:
    """The matrix as a text table."""
    columns = (
        "fault",
        "sent",
        "finished",
        "failed",
        "failed first attempts",
        "wrong texts",
        "silently cut",
        "first byte",
        "pause",
    )
    result = Table(*columns, "recovery", "slots and owners", "failed attempts, as clients saw them", title="Faults")
    for row in rows:
        counts = row.counts
        numbers = (counts.sent, counts.finished, counts.failed, counts.failed_first, counts.wrong, counts.cut)
        waits = (f"{counts.first_byte_seconds:.1f} s", f"{counts.pause_seconds:.1f} s")
        recovery = "—" if row.recovery_seconds is None else f"{row.recovery_seconds:.1f} s"
        result.add_row(
            row.fault, *map(str, numbers), *waits, recovery,
            ", ".join([*row.violations, *row.broken_limits()]) or row.error or "as they should be",
            "; ".join([*row.notes, *failed_attempts(counts)]), style="red" if row.is_bad else "",
        )  # fmt: skip
    return result
