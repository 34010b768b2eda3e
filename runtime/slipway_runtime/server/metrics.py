"""The numbers of one replica under vLLM's exact names, so that dashboards, KEDA recipes and pickers work unchanged.

Gauges and counters are read from the engine when someone scrapes; histograms are fed as requests end.
Labels are bounded: the served name and engine "0", never anything that a client sends.
"""

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from slipway_runtime.messages import EngineFacts, EngineStats, FinishReason
from slipway_runtime.server.generation import Record

_TTFT: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_BETWEEN: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_LATENCY: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0),
    *(50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_ITERATION: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_LABELS: Final = ("model_name", "engine")
_FINISHED: Final = {FinishReason.CANCELLED: "abort"}  # vLLM's word; the others are the same


class Metrics:
    """All metrics of one loaded model, in a registry of their own."""

    def __init__(
        self,
        model_name: str,
        facts: EngineFacts,
        stats: Callable[[], EngineStats],
        *,
        gpu_memory_utilization: float,
    ) -> None:
        self.registry = CollectorRegistry()
        self._values = (model_name, "0")
        tokens = one_two_five(facts.max_model_len)
        seconds = self._histogram
        self._ttft = seconds("time_to_first_token_seconds", "Time to first token in seconds.", _TTFT)
        self._itl = seconds("inter_token_latency_seconds", "Time between outputs in seconds.", _BETWEEN)
        self._tpot = seconds("request_time_per_output_token_seconds", "Mean time of an output token.", _BETWEEN)
        self._e2e = seconds("e2e_request_latency_seconds", "Time from arrival to the last token.", _LATENCY)
        self._queue = seconds("request_queue_time_seconds", "Time spent waiting in the queue.", _LATENCY)
        self._prefill = seconds("request_prefill_time_seconds", "Time spent in prefill.", _LATENCY)
        self._decode = seconds("request_decode_time_seconds", "Time spent in decode.", _LATENCY)
        self._inference = seconds("request_inference_time_seconds", "Time spent running.", _LATENCY)
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", tokens)
        self._generated = self._histogram("request_generation_tokens", "Generated tokens of a request.", tokens)
        self._max_tokens = self._histogram("request_params_max_tokens", "max_tokens of a request.", tokens)
        self._n = self._histogram("request_params_n", "n of a request.", (1, 2, 5, 10, 20))
        self._iteration = self._histogram("iteration_tokens_total", "Tokens computed in one step.", _ITERATION)
        self._success = self._counter("request_success", "Requests that ended, by reason.", "finished_reason")
        self._refused = self._counter("admission_rejections", "Requests refused at the door, by reason.", "reason")
        for reason in FinishReason:
            self._success.labels(*self._values, _FINISHED.get(reason, str(reason)))
        self.registry.register(_EngineNumbers(self._values, facts, stats, gpu_memory_utilization))
        self._computed = 0
        self._steps = 0

    def between_outputs(self, seconds: float) -> None:
        """Time between two outputs of one request."""
        self._itl.observe(seconds)

    def stepped(self, stats: EngineStats) -> None:
        """After each step: how much it computed."""
        if stats.steps > self._steps:
            self._iteration.observe(stats.computed_tokens - self._computed)
            self._steps, self._computed = stats.steps, stats.computed_tokens

    def refused(self, status: int) -> None:
        """A request was turned away before it was queued."""
        reason = {429: "max_num_queued_reqs", 503: "unavailable"}.get(status, "invalid")
        self._refused.labels(*self._values, reason).inc()

    def ended(self, record: Record) -> None:
        """A request has ended, however it did."""
        self._success.labels(*self._values, _FINISHED.get(record.finish_reason, str(record.finish_reason))).inc()
        self._e2e.observe(record.finished_at - record.arrived)
        self._prompt.observe(record.prompt_tokens)
        self._generated.observe(record.completion_tokens)
        self._max_tokens.observe(record.max_tokens)
        self._n.observe(1)
        if record.scheduled_at is None or record.queued_at is None:
            return
        self._queue.observe(max(0.0, record.scheduled_at - record.queued_at))
        if record.first_token_at is None or record.last_token_at is None:
            return
        self._ttft.observe(record.first_token_at - record.arrived)
        self._prefill.observe(record.first_token_at - record.scheduled_at)
        self._decode.observe(record.last_token_at - record.first_token_at)
        self._inference.observe(record.last_token_at - record.scheduled_at)
        if record.completion_tokens > 1:
            spent = record.last_token_at - record.first_token_at
            self._tpot.observe(spent / (record.completion_tokens - 1))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        metric = Histogram(f"vllm:{name}", text, _LABELS, buckets=buckets, registry=self.registry)
        return metric.labels(*self._values)

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(f"vllm:{name}", text, (*_LABELS, label), registry=self.registry)


class _EngineNumbers(Collector):
    """Reads the engine's own counters at the moment of a scrape."""

    def __init__(
        self,
        values: tuple[str, str],
        facts: EngineFacts,
        stats: Callable[[], EngineStats],
        gpu_memory_utilization: float,
    ) -> None:
        self._values = values
        self._facts = facts
        self._stats = stats
        self._utilization = gpu_memory_utilization

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily]:
        """One family after the other."""
        stats = self._stats()
        total = max(stats.blocks_total, 1)
        yield self._gauge("num_requests_running", "Requests in the running batch.", stats.running)
        yield self._gauge("num_requests_waiting", "Requests waiting to be processed.", stats.waiting)
        yield self._gauge(
            "kv_cache_usage_perc", "KV cache that live requests hold. 1 means all.", stats.blocks_live / total
        )
        yield self._counter("num_preemptions", "Requests set back to give up their blocks.", stats.preemptions)
        yield self._counter("prompt_tokens", "Prompt tokens processed.", stats.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", stats.generated_tokens)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the cache.", stats.prefix_queries)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the cache.", stats.prefix_hits)
        yield self._counter("prompt_tokens_cached", "Prompt tokens that needed no computing.", stats.prefix_hits)
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Waiting requests, by what they wait for.",
            labels=(*_LABELS, "reason"),
        )
        waiting.add_metric((*self._values, "capacity"), stats.waiting)
        waiting.add_metric((*self._values, "deferred"), 0)
        yield waiting
        # Reusable prefixes are free on demand: apart from the live blocks, or caching would look like load.
        cached = GaugeMetricFamily(
            "slipway:kv_cache_blocks", "Blocks of the KV pool, by what is in them.", labels=(*_LABELS, "state")
        )
        free = stats.blocks_total - stats.blocks_live - stats.blocks_cached
        for state, count in (("live", stats.blocks_live), ("cached", stats.blocks_cached), ("free", free)):
            cached.add_metric((*self._values, state), count)
        yield cached
        yield self._cache_config()

    def _cache_config(self) -> GaugeMetricFamily:
        facts = self._facts
        info = {
            "block_size": str(facts.block_size),
            "num_gpu_blocks": str(facts.num_blocks),  # gateway pickers read the pool under this name on CPUs too
            "cache_dtype": facts.dtype,
            "enable_prefix_caching": "True",
            "gpu_memory_utilization": str(self._utilization),
            "model_name": self._values[0],
            "engine": self._values[1],
        }
        family = GaugeMetricFamily("vllm:cache_config_info", "How the KV cache is set up.", labels=tuple(info))
        family.add_metric(tuple(info.values()), 1)
        return family

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        family.add_metric(self._values, value)
        return family


def one_two_five(limit: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, … up to the limit."""
    series = [digit * 10**power for power in range(len(str(limit)) + 1) for digit in (1, 2, 5)]
    return tuple(value for value in series if value <= limit)
