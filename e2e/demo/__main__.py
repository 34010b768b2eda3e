"""The command `make demo`: starts a cluster, installs Slipway, and shows what it does, step by step.

    python -m e2e.demo [--keep]

Steps: one request, scaling, a canary that is promoted, one that is rolled back, an adapter, a warm claim beside a cold
start, scale to zero. The exit code is 1 when a step failed or something was not as promised; what to look at is
printed. `--keep` leaves the cluster up, also after a failure.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.markup import escape

from e2e.cluster import build, detached, launcher_lock, preflight
from e2e.cluster.access import Access
from e2e.cluster.launch import GATEWAY, Cluster
from e2e.cluster.paths import cluster_folder
from e2e.demo.acts import Acts
from e2e.demo.narration import STEPS, StepFailedError, console, print_note, step
from e2e.demo.summary import Figures, figure_table, promise_lines, promises
from e2e.slipway import Slipway


def main() -> int:
    """Run the demo; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m e2e.demo", description=__doc__.split("\n")[0])
    parser.add_argument("--keep", action="store_true", help="leave the cluster up and print what to try next")
    keep = parser.parse_args().keep
    figures = Figures()
    failure = ""
    try:
        with a_cluster(keep, figures) as access:
            slipway = Slipway(access)
            try:
                with step(2, "Install Slipway from its chart with helm"):
                    slipway.install()
                Acts(slipway, figures).run()
            except Exception as exc:  # noqa: BLE001  the summary says what was kept, and where it ended
                failure = str(exc) if isinstance(exc, StepFailedError) else f"{type(exc).__name__}: {exc}"
            if keep:
                next_steps(slipway)
    except KeyboardInterrupt:
        sys.exit("interrupted; the cluster is gone")
    except StepFailedError as exc:  # of the first step or the last
        failure = failure or str(exc)
    figures.total_seconds = time.monotonic() - figures.started
    return summarize(figures, failure)


def summarize(figures: Figures, failure: str) -> int:
    """Print the figures and the promises; the exit code."""
    made = promises(figures)
    console.print()
    console.print(figure_table(figures))
    for line in promise_lines(made):
        console.print(line, soft_wrap=True)
    if failure:
        console.print(f"\n[red]{escape(failure)}[/]", soft_wrap=True)
    if failure or not all(one.kept for one in made):
        print_note(f"Logs: {cluster_folder('default') / 'logs'}; `make demo KEEP=1` leaves the cluster up to look at.")
        return 1
    return 0


@contextmanager
def a_cluster(keep: bool, figures: Figures) -> Iterator[Access]:
    """A running cluster: one that ends with this block, or, to be kept, one that lives on after it."""
    folder = cluster_folder("default")
    with step(1, "A real Kubernetes 1.36 of local processes: two nodes with 8 fake GPUs each"):
        if launcher_lock.stop(folder):
            print_note("ended a cluster that was still up")
        preflight.require()
        build.ensure()
        started = figures.started = time.monotonic()
        cluster = None if keep else Cluster(folder=folder, publish=GATEWAY)
        if cluster:
            cluster.start()
            cluster.wait_for_nodes()
        access = cluster or detached.start(folder)
        figures.cluster_seconds = time.monotonic() - started
        print_note(f"KUBECONFIG={access.kubeconfig}")
    try:
        yield access
    except BaseException:
        launcher_lock.stop(folder)
        raise
    if cluster:
        with step(STEPS, "Tear down"):
            cluster.stop()


def next_steps(slipway: Slipway) -> None:
    """Commands to try while the cluster stays up."""
    access = slipway.access
    console.print(
        f"""
The cluster stays up. Try, in a shell:

  export KUBECONFIG={access.kubeconfig}
  export PATH={access.tools}:$PATH
  kubectl get infsvc,lora,wpool,pods
  kubectl explain infsvc.spec.autoscaling
  .venv/bin/kubectl-slipway console                   # services, decisions, live plots and a chat in the browser
  kubectl delete pod -l slipway.dev/service=chat      # and see it replaced
  export OPENAI_BASE_URL={slipway.base_url} OPENAI_API_KEY=none
  curl -N $OPENAI_BASE_URL/chat/completions -H 'content-type: application/json' \\
    -d '{{"model": "chat", "stream": true, "messages": [{{"role": "user", "content": "Hello"}}]}}'

`make down` ends it.""",
        markup=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    sys.exit(main())
