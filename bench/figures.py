"""The result of a benchmark: named figures with their unit and the peer they are compared with."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table


def share_of(values: Sequence[float], share: float) -> float:
    """The value that so large a share of the values does not exceed: 0.5 is the median, 1.0 the largest."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def seconds_each(call: Callable[[], object], *, repeats: int = 5, calls: int = 200) -> float:
    """CPU seconds of one call: the best of a few repeats."""
    best = float("inf")
    for _ in range(repeats):
        begun = time.process_time()
        for _ in range(calls):
            call()
        best = min(best, time.process_time() - begun)
    return best / calls


@dataclass(frozen=True)
class Figure:
    """One number, or one ratio against a peer of the same run; with its aim, where it has one."""

    name: str
    value: float
    unit: str
    note: str = ""
    at_most: float | None = None
    at_least: float | None = None

    @property
    def verdict(self) -> str:
        """The aim, and by how much it is missed: `aim ≤ 2: gap 0.40`; empty where there is no aim."""
        if self.at_most is not None:
            gap = self.value - self.at_most
            return f"aim ≤ {self.at_most:g}" + (f": gap {gap:,.2f}" if gap > 0 else "")
        if self.at_least is not None:
            gap = self.at_least - self.value
            return f"aim ≥ {self.at_least:g}" + (f": gap {gap:,.2f}" if gap > 0 else "")
        return ""


@dataclass(frozen=True)
class Section:
    """The figures of one benchmark."""

    title: str
    figures: tuple[Figure, ...]

    def table(self) -> Table:
        """The figures as a text table."""
        table = Table(title=self.title, title_justify="left")
        table.add_column("figure")
        table.add_column("value", justify="right")
        table.add_column("unit")
        table.add_column("measured how")
        for figure in self.figures:
            how = "; ".join(part for part in (figure.note, figure.verdict) if part)
            table.add_row(figure.name, f"{figure.value:,.2f}", figure.unit, how)
        return table
