"""The command `python -m bench [gateway] [runtime] …`: runs the named benchmarks, or all, and prints figures."""

import argparse
import importlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from bench.figures import Section
from bench.machine import this_machine

BENCHMARKS = (
    "gateway",
    "routing",
    "handover",
    "runtime",
    "linears",
    "cpu_steps",
    "engine",
    "features",
    "eviction",
    "determinism",
    "soak",
    "cluster",
    "operator_scale",
    "saturation",
    "failover",
    "adapters_at_scale",
    "warm_claim",
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
    sections: list[Section] = []
    failures = 0
    for name in options.benchmarks or BENCHMARKS:
        with console.status(f"{name} …"):
            try:
                sections.append(importlib.import_module(f"bench.{name}").measure())
            except Exception as failure:  # noqa: BLE001  one benchmark that cannot run must not hide the others
                failures += 1
                console.print(f"[red]{name} could not be measured:[/] {type(failure).__name__}: {failure}")
                continue
        console.print(sections[-1].table(), "")
    if options.json:
        body = {"machine": asdict(machine), "sections": [asdict(section) for section in sections]}
        options.json.write_text(json.dumps(body, indent=2) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
