"""Prometheus metrics of one replica under vLLM's names, so that dashboards, KEDA recipes and pickers work unchanged.

Gauges and counters are read from the engine at a scrape; histograms are updated when requests end.
Labels are bounded: the served name, engine "0", loaded adapters, the tenants with the longest queues, and at most
MAX_TOKEN_LABELS pairs of tenant and adapter. A scrape builds the engine's series anew (`EngineNumbers`), so adapters
and tenants that are gone leave none behind.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from slipway_api.runtime_api import MOST_TENANTS
from slipway_runtime.messages import DraftModelStats, EngineFacts, EngineStats, FinishReason
from slipway_runtime.server.fields import OTHER
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


LABELS: Final = ("model_name", "engine")
Family = GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily
_SLEEP_STATES: Final = ("awake", "weights_offloaded", "discard_all")


def longest_queues(stats: EngineStats) -> dict[str, int]:
    """Waiting requests by tenant, for the MOST_TENANTS tenants with the longest queues."""
    return dict(sorted(stats.waiting_by_tenant, key=lambda entry: -entry[1])[:MOST_TENANTS])


class EngineNumbers(Collector):
    """Prometheus collector for the statistics of the last step."""

    def __init__(
        self,
        values: tuple[str, str],
        facts: EngineFacts,
        stats: Callable[[], EngineStats],
        gpu_memory_utilization: float,
        adapter_names: Callable[[Sequence[str]], Sequence[str]],
        *,
        legacy_names: bool = False,
    ) -> None:
        self.asleep = 0  # level of sleep
        self._values = values
        self._facts = facts
        self._stats = stats
        self._utilization = gpu_memory_utilization
        self._adapter_names = adapter_names
        self._legacy_names = legacy_names

    def collect(self) -> Iterator[Family]:
        """Yield all metric families."""
        stats = self._stats()
        yield from self._requests(stats)
        yield from self._cache(stats)
        yield from self._tokens(stats)
        facts = self._facts
        kernels = {"compiled": facts.kernels_compiled, "shared": facts.kernels_shared, "refused": facts.kernels_refused}
        if any(kernels.values()):
            yield self._labelled(
                "slipway:kernels_at_start", "Kernels at the start, by where they came from.", "origin", kernels
            )
        if self._facts.host_blocks:
            yield from self._host_memory(stats)
        if self._facts.max_adapters:
            yield self._adapters(stats)
        if self._facts.speculation != "none":
            yield from self._speculation(stats)
        if self._legacy_names:
            yield from self._by_older_names(stats)
        yield self._labelled(
            "vllm:engine_sleep_state",
            "Whether the engine sleeps, and how deeply.",
            "sleep_state",
            {state: int(level == self.asleep) for level, state in enumerate(_SLEEP_STATES)},
        )

    def _requests(self, stats: EngineStats) -> Iterator[Family]:
        yield self._gauge("vllm:num_requests_running", "Requests in the running batch.", stats.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests waiting to be processed.", stats.waiting)
        # Deferred requests wait for their adapter, not for capacity.
        deferred = min(stats.waiting, len(stats.waiting_adapters))
        yield self._labelled(
            "vllm:num_requests_waiting_by_reason",
            "Waiting requests, by what they wait for.",
            "reason",
            {"capacity": stats.waiting - deferred, "deferred": deferred},
        )
        yield self._gauge("slipway:num_requests_paused", "Answers that wait for their reader.", stats.paused)
        yield self._gauge("slipway:waiting_tokens", "Prompt tokens of waiting requests.", stats.waiting_tokens)
        if longest := longest_queues(stats):
            yield self._labelled(
                "slipway:num_requests_waiting_by_tenant", "Waiting requests, by tenant.", "tenant", longest
            )
        yield self._counter("vllm:num_preemptions", "Requests set back to give up their blocks.", stats.preemptions)
        yield self._counter(
            "vllm:corrupted_requests",
            "Answers that ended with an error because the model's output was NaN or infinite.",
            stats.invalid_logits,
        )

    def _cache(self, stats: EngineStats) -> Iterator[Family]:
        usage = stats.blocks_live / max(stats.blocks_total, 1)
        yield self._gauge("vllm:kv_cache_usage_perc", "KV cache that live requests hold. 1 means all.", usage)
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.", stats.prefix_queries)
        on_device = stats.prefix_hits - stats.host_hits
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache.", on_device)
        # Cached prefix blocks are evicted on demand: counted apart from live blocks, or caching would look like load.
        free = stats.blocks_total - stats.blocks_live - stats.blocks_cached
        yield self._labelled(
            "slipway:kv_cache_blocks",
            "Blocks of the KV pool, by what is in them.",
            "state",
            {"live": stats.blocks_live, "cached": stats.blocks_cached, "free": free},
        )
        yield self._gauge("slipway:invalid_kv_blocks", "KV of adapters that are not resident.", stats.invalid_kv_blocks)
        yield self._cache_config()

    def _tokens(self, stats: EngineStats) -> Iterator[Family]:
        yield self._counter("vllm:prompt_tokens", "Prompt tokens processed.", stats.prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens generated.", stats.generated_tokens)
        yield self._counter("vllm:prompt_tokens_cached", "Prompt tokens that needed no computing.", stats.prefix_hits)
        by_source = CounterMetricFamily(
            "vllm:prompt_tokens_by_source", "Prompt tokens, by where their KV came from.", labels=(*LABELS, "source")
        )
        sources = {
            "local_compute": max(0, stats.prompt_tokens - stats.prefix_hits),
            "local_cache_hit": stats.prefix_hits - stats.host_hits,
            "external_kv_transfer": stats.host_hits,
        }
        for source, count in sources.items():
            by_source.add_metric((*self._values, source), count)
        yield by_source

    def _host_memory(self, stats: EngineStats) -> Iterator[Family]:
        """Host-memory cache, which vLLM calls external; only tokens that the device pool missed are looked up there."""
        missed = stats.prefix_queries - stats.prefix_hits + stats.host_hits
        yield self._counter("vllm:external_prefix_cache_queries", "Prompt tokens looked up in host memory.", missed)
        yield self._counter("vllm:external_prefix_cache_hits", "Prompt tokens found in host memory.", stats.host_hits)
        held = stats.host_blocks * self._facts.block_size * self._facts.bytes_per_token
        yield self._gauge("slipway:kv_host_bytes", "Host memory that holds cold prefixes.", held)
        yield self._counter("slipway:kv_host_demotions", "KV blocks copied to host memory.", stats.demotions)
        yield self._counter("slipway:kv_host_promotions", "KV blocks copied back from there.", stats.promotions)
        yield self._gauge("slipway:kv_host_active", "1 unless few hits switched it off.", int(stats.host_active))

    def _adapters(self, stats: EngineStats) -> Family:
        """Adapters for gateway pickers, which use the series with the newest value: so the value is the time."""
        info = {
            "max_lora": str(self._facts.max_adapters),
            "running_lora_adapters": ",".join(self._adapter_names(stats.running_adapters)),
            "waiting_lora_adapters": ",".join(self._adapter_names(stats.waiting_adapters)),
        }
        family = GaugeMetricFamily("vllm:lora_requests_info", "Adapters with requests.", labels=tuple(info))
        family.add_metric(tuple(info.values()), time.time())
        return family

    def _speculation(self, stats: EngineStats) -> Iterator[Family]:
        yield self._counter("vllm:spec_decode_num_drafts", "Drafts verified.", stats.drafts)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Tokens drafted.", stats.draft_tokens)
        yield self._counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens kept.", stats.accepted_tokens)
        positions = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens kept, by their place in the draft.",
            labels=(*LABELS, "position"),
        )
        for position, count in enumerate(stats.accepted_by_position):
            positions.add_metric((*self._values, str(position)), count)
        yield positions
        yield self._gauge(
            "slipway:speculation_active", "1 unless low acceptance switched it off.", int(stats.speculation_active)
        )
        if (model := stats.draft_model) is not None:
            yield from self._draft_model(stats, model)

    def _draft_model(self, stats: EngineStats, model: DraftModelStats) -> Iterator[Family]:
        of_lookup = stats.draft_tokens - model.draft_tokens, stats.accepted_tokens - model.accepted_tokens
        counts = {"promptLookup": of_lookup, "draftModel": (model.draft_tokens, model.accepted_tokens)}
        labels = (*LABELS, "source")
        drafted = CounterMetricFamily("slipway:draft_tokens", "Tokens drafted, by source.", labels=labels)
        accepted = CounterMetricFamily(
            "slipway:accepted_draft_tokens", "Drafted tokens kept, by source.", labels=labels
        )
        for source, (of_source, kept) in counts.items():
            drafted.add_metric((*self._values, source), of_source)
            accepted.add_metric((*self._values, source), kept)
        yield from (drafted, accepted)
        yield self._counter("slipway:draft_model_passes", "Forward passes of the draft model.", model.passes)
        computed = model.computed_tokens
        yield self._counter("slipway:draft_model_tokens", "Tokens that the draft model computed.", computed)
        usage = model.blocks_live / max(model.blocks_total, 1)
        yield self._gauge(
            "slipway:draft_model_kv_usage_perc", "KV cache of the draft model in use. 1 means all.", usage
        )

    def _by_older_names(self, stats: EngineStats) -> Iterator[Family]:
        """The names of older vLLM versions, which older dashboards use."""
        usage = stats.blocks_live / max(stats.blocks_total, 1)
        yield self._gauge("vllm:gpu_cache_usage_perc", "The older name of kv_cache_usage_perc.", usage)
        yield self._counter(
            "vllm:gpu_prefix_cache_queries", "The older name of prefix_cache_queries.", stats.prefix_queries
        )
        on_device = stats.prefix_hits - stats.host_hits
        yield self._counter("vllm:gpu_prefix_cache_hits", "The older name of prefix_cache_hits.", on_device)

    def _cache_config(self) -> Family:
        facts = self._facts
        info = {
            "block_size": str(facts.block_size),
            "num_gpu_blocks": str(facts.num_blocks),  # gateway pickers read the pool under this name on CPUs too
            "cache_dtype": facts.kv_dtype or facts.dtype,
            "enable_prefix_caching": str(facts.prefix_caching),
            "gpu_memory_utilization": str(self._utilization),
            "model_name": self._values[0],
            "engine": self._values[1],
        }
        family = GaugeMetricFamily("vllm:cache_config_info", "How the KV cache is set up.", labels=tuple(info))
        family.add_metric(tuple(info.values()), 1)
        return family

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._values, value)
        return family

    def _labelled(self, name: str, text: str, label: str, values: dict[str, int]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=(*LABELS, label))
        for key, value in values.items():
            family.add_metric((*self._values, key), value)
        return family


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
        self._preempted = self._histogram(
            "request_num_preemptions", "How often a request was set back.", (0, 1, 2, 5, 10)
        )
        self._iteration = self._histogram(
            "iteration_tokens_total",
            "Prompt and generated tokens of one step; a prompt counts whole in the step of its first token.",
            _ITERATION,
        )
        self._success = self._counter("request_success", "Requests that ended, by reason.", "finished_reason")
        self._refused = self._counter("admission_rejections", "Requests refused before the queue, by reason.", "reason")
        self._computed_kv = self._histogram("request_prefill_kv_computed_tokens", "Prompt tokens computed.", tokens)
        self._schedule = Histogram(
            "slipway:schedule_seconds",
            "What a step costs the scheduler, passes of a draft model included.",
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
            "tokens", "Tokens: input, cached, output; draft, accepted.", "tenant", "adapter", "kind"
        )
        self._ignored = self._own_counter(
            "ignored_fields", "Request fields that had no effect, by API; unknown names are `other`.", "api", "field"
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
        self._tokens = 0
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
            tokens = stats.prefilled_tokens + stats.generated_tokens
            self._iteration.observe(tokens - self._tokens)
            self._schedule.observe(stats.schedule_seconds)
            self._masks.labels(*self._values).inc(max(0.0, stats.mask_seconds - self._mask_seconds))
            self._steps, self._tokens, self._mask_seconds = stats.steps, tokens, stats.mask_seconds

    def refused(self, status: int) -> None:
        """Count a request that was refused before it was queued."""
        reason = {429: "max_num_queued_reqs", 503: "unavailable"}.get(status, "invalid")
        self._refused.labels(*self._values, reason).inc()

    def failed(self, status: int) -> None:
        """Count a request that got an error response and never entered the engine."""
        self._errors.labels(
            *self._values, _CLASS_OF_STATUS.get(status, "malformed" if status < 500 else "engine")
        ).inc()

    def ignored(self, api: str, fields: Mapping[str, bool]) -> None:
        """Count the ignored fields of a request; those that no table has are one series together."""
        for name in {name if is_known else OTHER for name, is_known in fields.items()}:
            self._ignored.labels(*self._values, api, name).inc()

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
        self._preempted.observe(record.preemptions)
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
        if record.draft_tokens:
            kinds |= {"draft": record.draft_tokens, "accepted": record.accepted_tokens}
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
