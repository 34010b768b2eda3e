"""Prometheus metrics of one replica under vLLM's names, so that dashboards, KEDA recipes and pickers work unchanged.

Gauges and counters are read from the engine at a scrape; histograms are updated when requests end.
Labels are bounded: the served name, engine "0", and at most MAX_TOKEN_LABELS pairs of tenant and adapter.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram

from slipway_runtime.messages import EngineFacts, EngineStats, FinishReason
from slipway_runtime.server.engine_metrics import LABELS, EngineNumbers
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
_SCHEDULE: Final = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0)
# Bucket bounds in seconds for goodput: requests by TTFT and by mean time per output token (TPOT).
GOOD_TTFT: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
GOOD_TPOT: Final = (0.01, 0.025, 0.05, 0.1, 0.2, 0.5)
MAX_TOKEN_LABELS: Final = 200  # pairs of tenant and adapter with counters of their own; all others share one
# vLLM's names of finish reasons; all others are equal to ours.
_FINISHED: Final = {
    FinishReason.CANCELLED: "abort",
    FinishReason.HANDED_OVER: "abort",
    FinishReason.OUT_OF_MEMORY: "error",
}
ERROR_CLASSES: Final = (
    "malformed", "unauthorized", "shed", "unavailable", "timeout", "cancelled", "engine", "out_of_memory",
)  # fmt: skip
_CLASS_OF_STATUS: Final = {401: "unauthorized", 429: "shed", 499: "cancelled", 503: "unavailable", 504: "timeout"}
_CLASS_OF_REASON: Final = {
    FinishReason.CANCELLED: "cancelled",
    FinishReason.TIMEOUT: "timeout",
    FinishReason.ERROR: "engine",
    FinishReason.OUT_OF_MEMORY: "out_of_memory",
}


class Metrics:
    """All metrics of one loaded model, in a registry of their own."""

    def __init__(
        self,
        model_name: str,
        facts: EngineFacts,
        stats: Callable[[], EngineStats],
        *,
        gpu_memory_utilization: float,
        adapter_names: Callable[[Sequence[str]], Sequence[str]] = lambda digests: (),
        legacy_names: bool = False,
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
        self._longest = self._histogram(
            "request_max_num_generation_tokens", "Tokens of the longest answer of a request.", tokens
        )
        self._max_tokens = self._histogram("request_params_max_tokens", "max_tokens of a request.", tokens)
        self._n = self._histogram("request_params_n", "n of a request.", (1, 2, 5, 10, 20))
        self._iteration = self._histogram("iteration_tokens_total", "Tokens computed in one step.", _ITERATION)
        self._success = self._counter("request_success", "Requests that ended, by reason.", "finished_reason")
        self._refused = self._counter("admission_rejections", "Requests refused at the door, by reason.", "reason")
        self._computed_kv = self._histogram("request_prefill_kv_computed_tokens", "Prompt tokens computed.", tokens)
        self._schedule = Histogram(
            "slipway:schedule_seconds",
            "What a step costs the scheduler.",
            LABELS,
            buckets=_SCHEDULE,
            registry=self.registry,
        ).labels(*self._values)
        self._masks = self._own_counter("mask_seconds", "Time spent on masks of grammars, beside the computing.")
        self._errors = self._own_counter("errors", "Requests without an answer, by class.", "class")
        self._latency = self._own_counter(
            "requests_by_latency", "Finished requests, by the smallest bounds that hold for them.", "ttft_le", "tpot_le"
        )
        self._tokens_by_tenant = self._own_counter(
            "tokens", "Tokens, by who asked and what answered.", "tenant", "adapter", "kind"
        )
        self._token_labels: set[tuple[str, str]] = set()
        for reason in FinishReason:
            self._success.labels(*self._values, _FINISHED.get(reason, str(reason)))
        for each in ERROR_CLASSES:
            self._errors.labels(*self._values, each)
        self.engine = EngineNumbers(
            self._values, facts, stats, gpu_memory_utilization, adapter_names, legacy_names=legacy_names
        )
        self.registry.register(self.engine)
        self._legacy_tpot = (
            self._histogram("time_per_output_token_seconds", "The older name of inter_token_latency.", _BETWEEN)
            if legacy_names
            else None
        )
        self._computed = 0
        self._mask_seconds = 0.0
        self._steps = 0

    def between_outputs(self, seconds: float) -> None:
        """Record the time between two outputs of one answer."""
        self._itl.observe(seconds)
        if self._legacy_tpot is not None:
            self._legacy_tpot.observe(seconds)

    def stepped(self, stats: EngineStats) -> None:
        """Record the size and the scheduling time of a step."""
        if stats.steps > self._steps:
            self._iteration.observe(stats.computed_tokens - self._computed)
            self._schedule.observe(stats.schedule_seconds)
            self._masks.labels(*self._values).inc(max(0.0, stats.mask_seconds - self._mask_seconds))
            self._steps, self._computed, self._mask_seconds = stats.steps, stats.computed_tokens, stats.mask_seconds

    def refused(self, status: int) -> None:
        """Count a request that was refused before it was queued."""
        reason = {429: "max_num_queued_reqs", 503: "unavailable"}.get(status, "invalid")
        self._refused.labels(*self._values, reason).inc()

    def failed(self, status: int) -> None:
        """Count a request that got an error response and never entered the engine."""
        self._errors.labels(
            *self._values, _CLASS_OF_STATUS.get(status, "malformed" if status < 500 else "engine")
        ).inc()

    def ended(self, record: Record) -> None:
        """Record a request that has ended, also after an error."""
        if record.finish_reason in _CLASS_OF_REASON:
            self._errors.labels(*self._values, _CLASS_OF_REASON[record.finish_reason]).inc()
        self._count_tokens(record)
        self._success.labels(*self._values, _FINISHED.get(record.finish_reason, str(record.finish_reason))).inc()
        self._e2e.observe(record.finished_at - record.arrived)
        self._prompt.observe(record.prompt_tokens)
        self._generated.observe(record.completion_tokens)
        self._longest.observe(record.longest_answer)
        self._max_tokens.observe(record.max_tokens)
        self._n.observe(record.n)
        self._computed_kv.observe(record.prompt_tokens - record.cached_tokens)
        if record.scheduled_at is None or record.queued_at is None:
            return
        self._queue.observe(max(0.0, record.scheduled_at - record.queued_at))
        if record.first_token_at is None or record.last_token_at is None:
            return
        self._ttft.observe(record.first_token_at - record.arrived)
        self._prefill.observe(record.first_token_at - record.scheduled_at)
        self._decode.observe(record.last_token_at - record.first_token_at)
        self._inference.observe(record.last_token_at - record.scheduled_at)
        # Answers of one request are computed in the same steps: each step makes a token of each answer.
        steps = record.completion_tokens / record.n - 1
        mean = (record.last_token_at - record.first_token_at) / steps if steps > 0 else 0.0
        if steps > 0:
            self._tpot.observe(mean)
        if record.finish_reason in {FinishReason.STOP, FinishReason.LENGTH}:
            first = record.first_token_at - record.arrived
            self._latency.labels(*self._values, _bound(GOOD_TTFT, first), _bound(GOOD_TPOT, mean)).inc()

    def _count_tokens(self, record: Record) -> None:
        labels = (record.tenant, record.adapter)
        if labels not in self._token_labels and len(self._token_labels) >= MAX_TOKEN_LABELS:
            labels = ("other", "other")
        self._token_labels.add(labels)
        kinds = {
            "input": record.prompt_tokens,
            "cached": record.cached_tokens,
            "output": record.completion_tokens,
        }
        for kind, count in kinds.items():
            self._tokens_by_tenant.labels(*self._values, *labels, kind).inc(count)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        metric = Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=self.registry)
        return metric.labels(*self._values)

    def _own_counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"slipway:{name}", text, (*LABELS, *labels), registry=self.registry)

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(f"vllm:{name}", text, (*LABELS, label), registry=self.registry)


def _bound(bounds: tuple[float, ...], value: float) -> str:
    """The smallest bound not below the value, as a label; `+Inf` above all bounds."""
    place = bisect_left(bounds, value)
    return str(bounds[place]) if place < len(bounds) else "+Inf"


def one_two_five(limit: int) -> tuple[int, ...]:
    """Bucket bounds 1, 2, 5, 10, 20, 50, … up to the limit."""
    series = [digit * 10**power for power in range(len(str(limit)) + 1) for digit in (1, 2, 5)]
    return tuple(value for value in series if value <= limit)
