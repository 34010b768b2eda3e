"""The figures that the demo measured, and the promises that they keep or break. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.table import Table

from bench.plan import LoadReport

WANTED_REPLICAS = 3
Figure = tuple[str, str]  # what was measured, and the value


@dataclass(frozen=True)
class Promise:
    """A sentence about the product, and whether this run kept it."""

    sentence: str
    kept: bool
    look_at: str  # a command that shows more when it was broken


@dataclass
class Figures:
    """The measurements of the steps; a step that did not run leaves its fields empty."""

    cluster_seconds: float = 0.0
    ready_seconds: float = 0.0
    ttft_seconds: float = 0.0
    stream_tokens_per_second: float = 0.0
    most_replicas: int = 0
    replicas_after: int = 0
    load: LoadReport | None = None
    promoted_seconds: float = 0.0
    rolled_back_seconds: float = 0.0
    rolled_back_because: str = ""
    adapter_seconds: float = 0.0
    adapter_answers: tuple[str, str] = ("", "")  # of the base model and of the adapter, to the same question
    adapter_restarts: int = 0
    cold_seconds: float = 0.0
    warm_seconds: float = 0.0
    claimed_pod: str = ""
    zero_pods: int = -1  # of the idle service before it was asked
    zero_ttft_seconds: float = 0.0
    started: float = 0.0  # monotonic
    total_seconds: float = 0.0
    loads: list[tuple[str, LoadReport]] = field(default_factory=list)


def promises(figures: Figures) -> list[Promise]:
    """Everything that the demo claims, in the order of its steps."""
    base, adapter = figures.adapter_answers
    failed = sum(load.failed for _, load in figures.loads)
    sent = sum(load.sent for _, load in figures.loads)
    return [
        Promise("One request streams tokens", figures.ttft_seconds > 0, "kubectl describe infsvc chat"),
        Promise(
            f"Load brings {WANTED_REPLICAS} replicas, its end brings one again (most: {figures.most_replicas})",
            figures.most_replicas >= WANTED_REPLICAS and figures.replicas_after == 1,
            "kubectl slipway why-scale chat",
        ),
        Promise(
            "A canary as good as before is promoted", figures.promoted_seconds > 0, "kubectl slipway status canary"
        ),
        Promise(
            "A slow canary is rolled back, with the numbers",
            figures.rolled_back_seconds > 0 and "TTFTP95" in figures.rolled_back_because,
            "kubectl slipway status canary",
        ),
        Promise(
            "An adapter is served beside its base model, without a restart",
            bool(base) and bool(adapter) and base != adapter and figures.adapter_restarts == 0,
            "kubectl describe lora sailor",
        ),
        Promise(
            "A claim from a warm pool is faster than a cold start",
            bool(figures.claimed_pod) and 0 < figures.warm_seconds < figures.cold_seconds,
            "kubectl describe wpool standby",
        ),
        Promise(
            "An idle service has no pod, and its first request is answered",
            figures.zero_pods == 0 and figures.zero_ttft_seconds > 0,
            "kubectl describe infsvc idle",
        ),
        Promise(
            f"No request was lost ({failed} of {sent} failed)",
            sent > 0 and failed == 0,
            "kubectl -n slipway-system logs -l app.kubernetes.io/component=gateway",
        ),
    ]


def figure_rows(figures: Figures) -> list[Figure]:
    """The measurements as text."""
    rows = [
        ("cluster up, nodes Ready", f"{figures.cluster_seconds:.1f} s"),
        ("kubectl apply to Ready", f"{figures.ready_seconds:.1f} s"),
        ("first token of one request", f"{figures.ttft_seconds * 1000:.0f} ms"),
        ("tokens/s of one stream", f"{figures.stream_tokens_per_second:.0f}"),
    ]
    if load := figures.load:
        rows += [
            ("tokens/s under load", f"{load.tokens_per_second:.0f}"),
            ("TTFT under load, p50 / p95", f"{load.ttft.p50 * 1000:.0f} / {load.ttft.p95 * 1000:.0f} ms"),
            ("replicas", f"1 → {figures.most_replicas} → {figures.replicas_after}"),
        ]
    rows += [
        ("canary promoted after", f"{figures.promoted_seconds:.1f} s"),
        ("slow canary rolled back after", f"{figures.rolled_back_seconds:.1f} s"),
        ("adapter served after", f"{figures.adapter_seconds:.1f} s"),
        ("cold start / warm claim", f"{figures.cold_seconds:.1f} / {figures.warm_seconds:.1f} s"),
        ("first token from zero replicas", f"{figures.zero_ttft_seconds:.1f} s"),
    ]
    rows += [
        (f"{name}: sent / finished / failed / retried after 429", f"{o.sent} / {o.finished} / {o.failed} / {o.retried}")
        for name, o in figures.loads
    ]
    return [*rows, ("all of it, without the build of the cluster's binary", f"{figures.total_seconds:.0f} s")]


def figure_table(figures: Figures) -> Table:
    """The figures, to print."""
    table = Table(title="What was measured", show_header=False, title_justify="left")
    for name, value in figure_rows(figures):
        table.add_row(name, value)
    return table


def promise_lines(made: Sequence[Promise]) -> list[str]:
    """One line a promise, in rich's markup; a broken one says what to look at."""
    return [
        f"  [green]✓[/] {one.sentence}" if one.kept else f"  [red]✗ {one.sentence}[/]\n      look at: {one.look_at}"
        for one in made
    ]
