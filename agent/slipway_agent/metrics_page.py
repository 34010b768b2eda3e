"""The agent's own metrics page: the metrics of the dialect, under the names that our runtime uses. Pure."""

from collections.abc import Iterable, Mapping
from typing import Final

from slipway_agent.page import Series
from slipway_agent.readings import Page, matching
from slipway_api.dialect import EngineMetrics, Metric

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_PARTS: Final = ("_bucket", "_sum", "_count")


def _numbers(metrics: EngineMetrics) -> tuple[tuple[str, str, tuple[Metric, ...]], ...]:
    return (
        ("gauge", "vllm:num_requests_running", metrics.running),
        ("gauge", "vllm:num_requests_waiting", metrics.waiting),
        ("gauge", "vllm:kv_cache_usage_perc", (metrics.kv_usage,)),
        ("counter", "vllm:num_preemptions_total", metrics.preemptions),
        ("counter", "vllm:prefix_cache_queries_total", metrics.prefix_queries),
        ("counter", "vllm:prefix_cache_hits_total", metrics.prefix_hits),
        ("counter", "vllm:prompt_tokens_total", metrics.prompt_tokens),
        ("counter", "vllm:generation_tokens_total", metrics.generation_tokens),
    )


def _histograms(metrics: EngineMetrics) -> tuple[tuple[str, Metric | None], ...]:
    return (
        ("vllm:time_to_first_token_seconds", metrics.time_to_first_token),
        ("vllm:inter_token_latency_seconds", metrics.inter_token_latency),
    )


def all_names(metrics: EngineMetrics) -> frozenset[str]:
    """The names on the engine's page that `render` needs."""
    names = {metric.name for _, _, named in _numbers(metrics) for metric in named}
    histograms = [metric for _, metric in _histograms(metrics) if metric is not None]
    return frozenset(names | {metric.name + part for metric in histograms for part in _PARTS})


def render(page: Page, metrics: EngineMetrics, model: str) -> bytes:
    """The page. A metric that the engine does not have is left out: Prometheus tells absent from zero."""
    lines: list[str] = []
    for kind, name, named in _numbers(metrics):
        series = [one for metric in named for one in matching(page, metric)]
        if series:
            total = sum(one.value for one in series)
            value = total / len(series) if name.endswith("_perc") else total
            lines += [f"# TYPE {name} {kind}", f"{name}{_braces(_of(model))} {value!r}"]
    for name, metric in _histograms(metrics):
        found = [(part, one) for part in _PARTS for one in page.get(metric.name + part, ())] if metric else []
        if metric and (kept := [(part, one) for part, one in found if one.has(metric.labels)]):
            lines.append(f"# TYPE {name} histogram")
            lines += _summed(name, kept, model)
    return ("\n".join(lines) + "\n").encode()


def _summed(name: str, found: Iterable[tuple[str, Series]], model: str) -> list[str]:
    """The lines of a histogram, added up over all labels but that of the bucket."""
    sums: dict[tuple[str, str], float] = {}
    for part, one in found:
        key = (part, one.labels.get("le", "") if part == "_bucket" else "")
        sums[key] = sums.get(key, 0.0) + one.value
    lines = []
    for (part, bound), value in sums.items():
        labels = _of(model) | ({"le": bound} if part == "_bucket" else {})
        lines.append(f"{name}{part}{_braces(labels)} {value!r}")
    return lines


def _of(model: str) -> dict[str, str]:
    return {"model_name": model} if model else {}


def _braces(labels: Mapping[str, str]) -> str:
    inside = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{inside}}}" if inside else ""


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
