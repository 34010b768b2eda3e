"""The command `python -m bench [gateway] [runtime] …`: runs the named benchmarks, or all, and prints figures."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.figures import Section
from bench.machine import this_machine
from bench.processes import measure_in_process

BENCHMARKS = (
    "gateway",
    "routing",
    "vllm_routing",
    "hedging",
    "handover",
    "capacity",
    "flood",
    "refusals",
    "idle",
    "runtime",
    "linears",
    "cpu_steps",
    "gpu_steps",
    "gpu_plan",
    "engine",
    "features",
    "eviction",
    "determinism",
    "soak",
    "request_memory",
    "cluster",
    "operator_scale",
    "saturation",
    "vllm_agent",
    "failover",
    "adapters_at_scale",
    "warm_claim",
    "kubeai",
)


def main() -> int:
    """Run what was asked for; exit status 1 when one of them could not be measured."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("benchmarks", nargs="*", metavar="BENCHMARK", help=" | ".join(BENCHMARKS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--minutes", type=float, help="length of the soak (default: 3)")
    options = parser.parse_args()
    if options.minutes:
        os.environ["SLIPWAY_SOAK_MINUTES"] = str(options.minutes)
    if unknown := set(options.benchmarks) - set(BENCHMARKS):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    console, machine = Console(width=None if sys.stdout.isatty() else 120), this_machine()
    console.print(f"[bold]{machine}[/]", soft_wrap=True)
    console.print("Figures of different machines, or of busy ones, cannot be compared; ratios are within this run.\n")

    def keep(results: Sequence[Result]) -> None:
        """Write the figures so far: a run of hours that is cut off keeps them."""
        if options.json:
            sections = [asdict(one.section) | {"seconds": one.seconds} for one in results if one.section is not None]
            options.json.write_text(json.dumps({"machine": asdict(machine), "sections": sections}, indent=2) + "\n")

    results = run(options.benchmarks or BENCHMARKS, measure_in_process, console, keep)
    return 1 if any(one.section is None for one in results) else 0


@dataclass(frozen=True)
class Result:
    """Outcome of one benchmark: its section, or why there is none."""

    name: str
    seconds: float
    section: Section | None
    failure: str = ""


def run(
    names: Sequence[str],
    measure: Callable[[str], Section],
    console: Console,
    keep: Callable[[Sequence[Result]], None] = lambda results: None,
) -> list[Result]:
    """Run benchmarks one after another; print each section, and at the end how long each took and which failed.

    `keep` gets the results so far after each of them.
    """
    results: list[Result] = []
    for name in names:
        section, failure, begun = None, "", time.monotonic()
        with console.status(f"{name} …"):
            try:
                section = measure(name)
            except Exception as error:  # noqa: BLE001  one benchmark that cannot run must not hide the others
                failure = f"{type(error).__name__}: {error}"
        results.append(Result(name, time.monotonic() - begun, section, failure))
        keep(results)
        if section is not None:
            console.print(section.table(), "")
        else:
            console.print(f"{name} could not be measured: {failure}\n", style="red", markup=False)
    total = sum(one.seconds for one in results)
    table = Table(title=f"{len(results)} benchmarks in {total:,.0f} s", title_justify="left")
    for column in ("benchmark", "seconds", "outcome"):
        table.add_column(column)
    for one in results:
        outcome = Text(one.failure[:200]) if one.section is None else f"{len(one.section.figures)} figures"
        table.add_row(one.name, f"{one.seconds:,.0f}", outcome)
    console.print(table)
    return results


if __name__ == "__main__":
    sys.exit(main())
