"""The command `make chaos`: injects every fault under load on the local cluster, and prints a table.

    python -m e2e.chaos [--list] [--only WORDS …] [--minutes 80]

The exit code is 1 when a text was wrong, a stream was cut without an error, a slot was occupied twice, a pod had no
owner, the services did not recover, or a request was lost or a first byte late that the fault does not explain.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator, Sequence

from rich.console import Console

from e2e.chaos.client import learn_references
from e2e.chaos.faults import FAULTS, Fault
from e2e.chaos.matrix import Row, run_matrix, sentence, table
from e2e.chaos.stage import AUTO, FIXED, Stage
from e2e.cluster import build, preflight
from e2e.cluster.launch import GATEWAY, Cluster
from e2e.cluster.paths import cluster_folder
from e2e.slipway import Slipway

console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the faults that were asked for; see the module's docstring for the exit code."""
    parser = argparse.ArgumentParser(prog="python -m e2e.chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="name the faults and end")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORDS", help="faults whose name contains these")
    parser.add_argument("--minutes", type=float, default=80.0, help="start no fault after so many minutes")
    options = parser.parse_args(arguments)
    faults = choose(options.only)
    if options.list:
        console.print("\n".join(fault.name for fault in faults))
        return 0
    if not faults:
        parser.error(f"no fault is called like {options.only}; see --list")
    preflight.require()
    build.ensure()
    until = time.monotonic() + options.minutes * 60
    rows: list[Row] = []
    try:
        for row in run_on_new_cluster(faults, until):
            rows.append(row)
            console.print(sentence(row), soft_wrap=True)
    except KeyboardInterrupt:
        rows.append(Row("the others", error="interrupted"))
    console.print(table(rows))
    return 1 if any(row.is_bad for row in rows) else 0


def run_on_new_cluster(faults: Sequence[Fault], until: float) -> Iterator[Row]:
    """Start a cluster, install Slipway, and run the faults on it."""
    with Cluster(folder=cluster_folder("chaos"), publish=GATEWAY) as cluster:
        cluster.wait_for_nodes()
        slipway = Slipway(cluster)
        slipway.install()
        stage = Stage(cluster, slipway)
        stage.prepare()
        references = asyncio.run(learn_references(slipway.base_url, [FIXED, AUTO]))
        yield from run_matrix(stage, faults, references, until=until)


def choose(words: Sequence[str]) -> list[Fault]:
    """Faults whose name contains one of the words; without words, all of them."""
    return [fault for fault in FAULTS if not words or any(word.lower() in fault.name.lower() for word in words)]


if __name__ == "__main__":
    sys.exit(main())
