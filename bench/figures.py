"""The result of a benchmark: named figures with their unit and the peer they are compared with."""

from dataclasses import dataclass

from rich.table import Table


@dataclass(frozen=True)
class Figure:
    """One number, or one ratio against a peer of the same run."""

    name: str
    value: float
    unit: str
    note: str = ""
    aim: float | None = None  # the most that it should be

    @property
    def against_aim(self) -> str:
        """How the value compares with its aim: `≤ 0.5`, or with the gap, `≤ 0.5: 1.7 times that`."""
        if self.aim is None:
            return ""
        if self.value <= self.aim:
            return f"≤ {self.aim:g}"
        return f"≤ {self.aim:g}: {self.value / self.aim:.1f} times that" if self.aim else "0: missed"


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
        has_aims = any(figure.aim is not None for figure in self.figures)
        if has_aims:
            table.add_column("aim")
        table.add_column("measured how")
        for figure in self.figures:
            aim = (figure.against_aim,) if has_aims else ()
            table.add_row(figure.name, f"{figure.value:,.2f}", figure.unit, *aim, figure.note)
        return table
