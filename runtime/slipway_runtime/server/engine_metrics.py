"""Engine metrics, collected at each scrape, under vLLM's names or, where vLLM has none, `slipway:` names.

Labels are bounded: constants, loaded adapters, and the tenants with the longest queues. Each scrape builds all series
anew, so adapters and tenants that are gone leave no stale series.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from slipway_api.runtime_api import MOST_TENANTS
from slipway_runtime.messages import EngineFacts, EngineStats

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
