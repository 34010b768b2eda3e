"""The table of a benchmark prints the gap to an aim that was missed."""

import pytest
from rich.console import Console

from bench.figures import Figure, Section


@pytest.mark.parametrize(
    ("value", "aim", "expected"),
    [
        (0.4, 0.5, "≤ 0.5"),
        (0.5, 0.5, "≤ 0.5"),
        (0.85, 0.5, "≤ 0.5: 1.7 times that"),
        (0, 0, "≤ 0"),
        (3, 0, "0: missed"),
    ],
)
def test_a_missed_aim_says_by_how_much(value: float, aim: float, expected: str):
    figure = Figure("changed spec → pod created, p99", value, "s", aim=aim)

    assert figure.against_aim == expected
    console = Console(width=120)
    with console.capture() as printed:
        console.print(Section("Operator", (figure, Figure("its CPU", 2.0, "s"))).table())
    assert expected in printed.get()


def test_a_table_without_aims_has_no_column_for_them():
    table = Section("Engine", (Figure("tokens/s", 2.0, ""),)).table()

    assert [column.header for column in table.columns] == ["figure", "value", "unit", "measured how"]
