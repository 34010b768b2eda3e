"""One run of several benchmarks: one that cannot run hides no other, and the durations and their sum are printed."""

import io

import pytest
from rich.console import Console

from bench.__main__ import run
from bench.figures import Figure, Section
from bench.processes import measure_in_process


def test_a_benchmark_that_fails_is_named_and_the_others_are_printed():
    def measure(name: str) -> Section:
        if name == "broken":
            raise FileNotFoundError("no [nginx] here")
        return Section(f"About {name}", (Figure("ratio", 0.5, "×"), Figure("peer that is missing", float("nan"), "×")))

    printed = io.StringIO()
    results = run(("first", "broken", "last"), measure, Console(file=printed, width=100))

    assert [one.section is None for one in results] == [False, True, False]
    assert "broken could not be measured: FileNotFoundError: no [nginx] here" in printed.getvalue()
    for text in ("About first", "About last", "0.50", "nan", "3 benchmarks in", "2 figures"):
        assert text in printed.getvalue()


def test_a_benchmark_runs_in_a_process_of_its_own_and_its_failure_is_told():
    with pytest.raises(ModuleNotFoundError, match="no_such_benchmark"):
        measure_in_process("no_such_benchmark")
