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
            table.add_row(figure.name, f"{figure.value:,.2f}", figure.unit, figure.note)
        return table
