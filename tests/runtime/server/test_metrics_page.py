"""docs/metrics.md says what is exported: every family with its type, labels and meaning, and nothing else."""

from pathlib import Path

import msgspec
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from slipway_runtime.command_line import parse_arguments, serve_settings
from slipway_runtime.messages import DraftModelStats, EngineFacts, EngineStats, FinishReason
from slipway_runtime.server.generation import Record
from slipway_runtime.server.metrics import Metrics

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
FACTS = EngineFacts(
    vocab_size=50, eos_token_ids=(), max_model_len=200, max_num_seqs=2, max_num_batched_tokens=8, block_size=4,
    num_blocks=100, bytes_per_token=1, weight_bytes=1, dtype="fp32", device="cpu", load_seconds=0, warmup_seconds=0,
    max_adapters=1, speculation="draft", host_blocks=8, kernels_compiled=1, kernels_shared=2, kernels_refused=3,
)  # fmt: skip
NUMBERS = {name: 0 for name in EngineStats.__struct_fields__ if name in {
    "running", "waiting", "waiting_tokens", "blocks_total", "blocks_live", "blocks_cached", "steps", "preemptions",
    "prefix_queries", "prefix_hits", "admitted", "finished", "aborted", "handed_over", "last_step_at",
}}  # fmt: skip
STATS = EngineStats(**NUMBERS, waiting_by_tenant=(("a", 1),), accepted_by_position=(1,), draft_model=DraftModelStats())
ENDED = Record(
    prompt_tokens=3, cached_tokens=0, completion_tokens=4, max_tokens=4, finish_reason=FinishReason.LENGTH,
    arrived=0.0, queued_at=0.1, scheduled_at=0.2, first_token_at=0.3, last_token_at=0.4, finished_at=0.5,
)  # fmt: skip


def exported(*, legacy_names: bool = False) -> dict[str, str]:
    """Each family of a replica with everything on: its name, and its row of the page."""
    metrics = Metrics("m", FACTS, lambda: STATS, gpu_memory_utilization=0.9, legacy_names=legacy_names)
    metrics.stepped(msgspec.structs.replace(STATS, steps=1))
    metrics.refused(429)
    metrics.ignored("chat", {"store": True})
    metrics.ended(ENDED)
    rows = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        if family.name.endswith("_created"):
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        own = ", ".join(f"`{label}`" for label in sorted(labels - {"model_name", "engine"})) or "–"
        rows[name] = f"| `{name}` | {family.type} | {own} | {family.documentation} |"
    return rows


@pytest.mark.capability("OB-1", "OB-2")
def test_the_page_lists_what_is_exported():
    named, legacy = exported(), exported(legacy_names=True)
    plain, older = PAGE.read_text(encoding="utf-8").split("## Older names")
    wanted = "\n".join(sorted(named.values()))
    wanted_older = "\n".join(sorted(row for name, row in legacy.items() if name not in named))

    assert [line for line in plain.splitlines() if line.startswith("| `")] == wanted.splitlines(), wanted
    assert [line for line in older.splitlines() if line.startswith("| `")] == wanted_older.splitlines(), wanted_older


@pytest.mark.capability("OB-2")
def test_older_names_are_there_for_those_who_ask_with_the_same_values():
    asked = serve_settings(parse_arguments(["serve", "/m", "--legacy-metric-names"]), {})
    unasked = serve_settings(parse_arguments(["serve", "/m"]), {})
    older = {
        "vllm:gpu_cache_usage_perc",
        "vllm:gpu_prefix_cache_queries_total",
        "vllm:gpu_prefix_cache_hits_total",
        "vllm:time_per_output_token_seconds",
    }
    assert set(exported(legacy_names=asked.legacy_metric_names)) - set(exported()) == older
    assert not older & set(exported(legacy_names=unasked.legacy_metric_names))

    stats = msgspec.structs.replace(STATS, prefix_queries=9, prefix_hits=4, blocks_live=2, blocks_total=8)
    metrics = Metrics("m", FACTS, lambda: stats, gpu_memory_utilization=0.9, legacy_names=True)
    metrics.between_outputs(0.25)
    labels = {"model_name": "m", "engine": "0"}
    for old, new in {
        "gpu_cache_usage_perc": "kv_cache_usage_perc",
        "gpu_prefix_cache_hits_total": "prefix_cache_hits_total",
        "gpu_prefix_cache_queries_total": "prefix_cache_queries_total",
        "time_per_output_token_seconds_sum": "inter_token_latency_seconds_sum",
    }.items():
        value = metrics.registry.get_sample_value(f"vllm:{old}", labels)
        assert value
        assert value == metrics.registry.get_sample_value(f"vllm:{new}", labels)


@pytest.mark.capability("KV-12", "OB-1")
def test_what_host_memory_gave_is_told_apart_from_what_the_pool_gave():
    stats = msgspec.structs.replace(
        STATS, prompt_tokens=110, prefix_queries=100, prefix_hits=60, host_hits=20, host_blocks=3, demotions=7,
        promotions=5, host_active=False,
    )  # fmt: skip
    facts = msgspec.structs.replace(FACTS, bytes_per_token=10)
    labels = {"model_name": "m", "engine": "0"}
    registry = Metrics("m", facts, lambda: stats, gpu_memory_utilization=0.9).registry

    def value(name: str, **more: str) -> float | None:
        return registry.get_sample_value(name, labels | more)

    assert value("vllm:prefix_cache_hits_total") == 40
    assert value("vllm:external_prefix_cache_queries_total") == 60
    assert value("vllm:external_prefix_cache_hits_total") == 20
    assert value("vllm:prompt_tokens_cached_total") == 60
    sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
    assert [value("vllm:prompt_tokens_by_source_total", source=source) for source in sources] == [50, 40, 20]
    assert value("slipway:kv_host_bytes") == 3 * 4 * 10
    assert (value("slipway:kv_host_demotions_total"), value("slipway:kv_host_promotions_total")) == (7, 5)
    assert value("slipway:kv_host_active") == 0
    unasked = Metrics("m", msgspec.structs.replace(facts, host_blocks=0), lambda: stats, gpu_memory_utilization=0.9)
    assert unasked.registry.get_sample_value("slipway:kv_host_active", labels) is None


@pytest.mark.capability("ST-10", "OB-1")
def test_a_replica_shows_the_kernels_of_its_start_by_origin_if_it_shares_them():
    labels = {"model_name": "m", "engine": "0"}
    shared = Metrics("m", FACTS, lambda: STATS, gpu_memory_utilization=0.9).registry
    off = msgspec.structs.replace(FACTS, kernels_compiled=0, kernels_shared=0, kernels_refused=0)
    alone = Metrics("m", off, lambda: STATS, gpu_memory_utilization=0.9).registry

    found = {
        origin: shared.get_sample_value("slipway:kernels_at_start", labels | {"origin": origin})
        for origin in ("compiled", "shared", "refused")
    }
    assert found == {"compiled": 1, "shared": 2, "refused": 3}
    assert alone.get_sample_value("slipway:kernels_at_start", labels | {"origin": "shared"}) is None
