"""The command `make demo`: starts a cluster, installs Slipway, streams tokens, scales and drains, explaining each step.

python -m e2e.demo [--keep]
"""

import argparse
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from bench.plan import LoadReport
from e2e.cluster import build, detached, launcher_lock, preflight
from e2e.cluster.access import Access
from e2e.cluster.launch import GATEWAY, Cluster
from e2e.cluster.paths import cluster_folder
from e2e.slipway import EXAMPLES, Slipway, wait_for

SERVICE = "chat"
QUESTION = "Tell me a short story about a lighthouse."
LOAD_SECONDS = 75.0
USERS = 24

console = Console(highlight=False)


@dataclass
class Figures:
    """The figures of the summary."""

    cluster_seconds: float = 0.0
    ready_seconds: float = 0.0
    ttft_seconds: float = 0.0
    stream_tokens_per_second: float = 0.0
    most_replicas: int = 1
    load: LoadReport | None = None


@contextmanager
def step(number: int, title: str) -> Iterator[None]:
    """One numbered step of the story, with the time it took."""
    console.print(f"\n[bold cyan]{number}/6[/] [bold]{title}[/]")
    started = time.monotonic()
    yield
    console.print(f"    [dim]{time.monotonic() - started:.1f} s[/]")


class Watcher:
    """Prints each new event and each change of a condition of the service while a block of `watching` runs."""

    def __init__(self, slipway: Slipway, figures: Figures) -> None:
        self.slipway, self.figures = slipway, figures
        self.printed: set[tuple[str, str, str]] = set()
        self.conditions: dict[str, tuple[str, str]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Print what happens until the block ends, its end included."""
        over = threading.Event()
        thread = threading.Thread(target=self._run, args=(over,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(timeout=10)

    def _run(self, over: threading.Event) -> None:
        last = False
        while not last:
            last = over.wait(0.5)
            try:
                self.print_changes()
            except Exception as exc:  # noqa: BLE001  narration must not end the demo
                console.print(f"    [dim]({type(exc).__name__} while looking; looking again)[/]")

    def print_changes(self) -> None:
        """Print what is new."""
        for event in self.slipway.events(SERVICE):
            identity = (event.uid, event.reason, event.note)
            if identity not in self.printed:
                self.printed.add(identity)
                colour = "yellow" if event.type == "Warning" else "green"
                at = event.at.astimezone().strftime("%H:%M:%S")
                console.print(f"    [dim]{at}[/] [{colour}]{event.reason:<17}[/] {event.note}", soft_wrap=True)
        status = self.slipway.service(SERVICE).get("status", {})
        self.figures.most_replicas = max(self.figures.most_replicas, status.get("readyReplicas", 0))
        for condition in status.get("conditions", []):
            now = (condition["status"], condition["reason"])
            if condition["type"] in ("Ready", "Stalled") and self.conditions.get(condition["type"]) != now:
                self.conditions[condition["type"]] = now
                mark = f"{condition['type']}={condition['status']}"
                sentence = f"{condition['reason']}: {condition.get('message', '')}"
                console.print(f"             [blue]{mark:<17}[/] {sentence}", soft_wrap=True)


def stream_one_answer(slipway: Slipway, figures: Figures) -> None:
    """Ask with the stock client and print the answer as it comes."""
    console.print(f"    [dim]client = OpenAI(base_url=[/]{slipway.base_url!r}[dim])[/]")
    console.print(f"    [bold]user[/]  {QUESTION}\n    [bold]{SERVICE}[/]  ", end="")
    started = time.monotonic()
    first = 0.0
    tokens = 0
    stream = slipway.openai().chat.completions.create(
        model=SERVICE, messages=[{"role": "user", "content": QUESTION}], stream=True, max_tokens=96, seed=7
    )
    for chunk in stream:
        if chunk.choices and (text := chunk.choices[0].delta.content):
            first = first or time.monotonic()
            tokens += 1
            console.print(text, end="", markup=False, soft_wrap=True)
    console.print()
    figures.ttft_seconds = first - started
    figures.stream_tokens_per_second = max(tokens - 1, 0) / max(time.monotonic() - first, 1e-9)


def drive_load(slipway: Slipway, figures: Figures) -> None:
    """Many users for a while; the autoscaler takes the service out, and back in after they have left."""
    console.print(f"    {USERS} users ask again and again for up to {LOAD_SECONDS:.0f} s; then they leave.")
    load = slipway.load(SERVICE, concurrency=USERS, seconds=LOAD_SECONDS, max_tokens=96, retry_429=True)
    figures.load = load.report()
    wait_for("one replica again", lambda: slipway.wait_ready(SERVICE, replicas=1, timeout=5), timeout=180)


def summary(figures: Figures) -> bool:
    """Print what was measured; whether it is what was promised."""
    assert figures.load is not None
    load = figures.load
    table = Table(title="What you saw", show_header=False, title_justify="left")
    table.add_row("cluster up, nodes Ready", f"{figures.cluster_seconds:.1f} s")
    table.add_row("kubectl apply to Ready", f"{figures.ready_seconds:.1f} s")
    table.add_row("first token of one request", f"{figures.ttft_seconds * 1000:.0f} ms")
    table.add_row("tokens/s of one stream", f"{figures.stream_tokens_per_second:.0f}")
    table.add_row("tokens/s under load", f"{load.tokens_per_second:.0f}")
    table.add_row("TTFT under load, p50 / p95", f"{load.ttft.p50 * 1000:.0f} / {load.ttft.p95 * 1000:.0f} ms")
    table.add_row("replicas", f"1 → {figures.most_replicas} → 1")
    table.add_row("requests sent / finished / failed", f"{load.sent} / {load.finished} / {load.failed}")
    table.add_row("answered after a 429 and a retry", str(load.retried))
    console.print()
    console.print(table)
    for sentence, count in load.failures.items():
        console.print(f"[red]failed {count}×:[/] {sentence}")
    if figures.most_replicas < 3:
        console.print(f"[red]the load brought {figures.most_replicas} replicas, not 3[/]")
    return load.failed == 0 and figures.most_replicas >= 3


def next_steps(slipway: Slipway) -> None:
    """What to try while the cluster stays up."""
    access = slipway.access
    console.print(
        f"""
The cluster stays up. Try, in a shell:

  export KUBECONFIG={access.kubeconfig}
  export PATH={access.tools}:$PATH
  kubectl get infsvc,pods
  kubectl explain infsvc.spec.autoscaling
  kubectl delete pod -l slipway.dev/service={SERVICE}      # and see it replaced
  export OPENAI_BASE_URL={slipway.base_url} OPENAI_API_KEY=none
  curl -N $OPENAI_BASE_URL/chat/completions -H 'content-type: application/json' \\
    -d '{{"model": "{SERVICE}", "stream": true, "messages": [{{"role": "user", "content": "Hello"}}]}}'

`make down` ends it.""",
        markup=False,
        soft_wrap=True,
    )


@contextmanager
def a_cluster(keep: bool, figures: Figures) -> Iterator[Access]:
    """A running cluster: one that ends with this block, or, to be kept, one that lives on when all went well."""
    folder = cluster_folder("default")
    with step(1, "A real Kubernetes 1.36 of local processes: two nodes with 8 fake GPUs each"):
        if launcher_lock.stop(folder):
            console.print("    [dim]ended a cluster that was still up[/]")
        preflight.require()
        build.ensure()
        started = time.monotonic()
        cluster = None if keep else Cluster(folder=folder, publish=GATEWAY)
        if cluster:
            cluster.start()
            cluster.wait_for_nodes()
        access = cluster or detached.start(folder)
        figures.cluster_seconds = time.monotonic() - started
        console.print(f"    KUBECONFIG={access.kubeconfig}", soft_wrap=True)
    try:
        yield access
    except BaseException:
        launcher_lock.stop(folder)
        raise
    if cluster:
        with step(6, "Tear down"):
            cluster.stop()


def run_steps(access: Access, figures: Figures) -> Slipway:
    """Steps 2 to 5, on a running cluster."""
    slipway = Slipway(access)
    with step(2, "Install Slipway from its chart with helm"):
        slipway.install()
    watcher = Watcher(slipway, figures)
    with step(3, f"kubectl apply -f {EXAMPLES.name}/chat.yaml"), watcher.watching():
        started = time.monotonic()
        slipway.apply(EXAMPLES / "chat.yaml")
        slipway.wait_ready(SERVICE, replicas=1)
        figures.ready_seconds = time.monotonic() - started
    with step(4, "One request, with the stock openai client"):
        stream_one_answer(slipway, figures)
    with step(5, "Load: replicas follow KV-cache usage and queue depth, out and back in"), watcher.watching():
        drive_load(slipway, figures)
    return slipway


def main() -> None:
    """Run the demo; exit code 1 when something was not as promised."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--keep", action="store_true", help="leave the cluster up and print what to try next")
    keep = parser.parse_args().keep
    figures = Figures()
    try:
        with a_cluster(keep, figures) as access:
            slipway = run_steps(access, figures)
            as_promised = summary(figures)
            if keep:
                next_steps(slipway)
    except KeyboardInterrupt:
        sys.exit("interrupted; the cluster is gone")
    sys.exit(0 if as_promised else 1)


if __name__ == "__main__":
    main()
