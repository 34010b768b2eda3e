"""What a metrics page means by a dialect: pages of real engines, and pages that cannot be trusted."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipway_agent import metrics_page
from slipway_agent.page import MOST_LINE_BYTES, MOST_PAGE_BYTES, MOST_SERIES, PageReader, Series, UnreadablePage
from slipway_agent.readings import Readings, read, wanted_names
from slipway_api.dialect import EngineMetrics, Metric, built_in

pytestmark = pytest.mark.capability("OP-11")

RECORDED = Path(__file__).parent / "recorded"
VLLM, SGLANG = built_in("vllm").metrics, built_in("sglang").metrics


def readings(page: str | bytes, metrics: EngineMetrics = VLLM) -> Readings:
    reader = PageReader(wanted_names(metrics))
    reader.feed(page.encode() if isinstance(page, str) else page)
    return read(reader.finish(), metrics)


def vllm_page(**values: str) -> str:
    """The recorded page, with other values for some metrics; an empty value removes the metric."""
    lines = []
    for line in (RECORDED / "vllm-0.32.0-metrics.txt").read_text().splitlines():
        name = line.replace("{", " ").split(" ")[0].removeprefix("vllm:")
        if name in values:
            if values[name]:
                lines.append(f"{line.rpartition(' ')[0]} {values[name]}")
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def test_the_page_of_vllm_is_read():
    found = readings(vllm_page(num_requests_running="3.0", num_requests_waiting="2.0", kv_cache_usage_perc="0.25"))
    assert (found.running, found.waiting, found.kv_usage) == (3, 2, 0.25)
    assert (found.blocks, found.block_size) == (2048, 128)
    assert found.start


def test_the_page_of_sglang_is_read():
    found = readings((RECORDED / "sglang-metrics.txt").read_text(), SGLANG)
    assert (found.running, found.waiting, found.kv_usage) == (3, 3, 0.5), "both ranks, and both queues"
    assert (found.blocks, found.block_size) == (40000, 1)
    assert (found.prompt_tokens, found.generation_tokens, found.finished, found.aborted) == (128, 512, 7, 1)
    assert found.start == ""


def test_another_start_of_the_engine_has_another_mark():
    marks = {readings(vllm_page(process_start_time_seconds=at)).start for at in ("1.5e+09", "1.5e+09", "1.6e+09")}
    assert len(marks) == 2


@pytest.mark.parametrize("gauge", ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"])
@pytest.mark.parametrize("value", ["", "NaN", "+Inf", "-1", "many"])
def test_a_gauge_that_is_missing_or_senseless_is_an_error_and_never_zero(gauge, value):
    with pytest.raises(UnreadablePage, match=gauge):
        readings(vllm_page(**{gauge: value}))


def test_a_percentage_is_not_taken_for_a_share():
    with pytest.raises(UnreadablePage, match="not between 0 and 1"):
        readings(vllm_page(kv_cache_usage_perc="42.0"))


def test_a_counter_that_is_absent_has_counted_nothing():
    assert readings(vllm_page(generation_tokens_total="")).generation_tokens == 0


def test_no_page_is_an_error():
    for page in ("", "<html>no metrics here</html>", "\x00" * 100):
        with pytest.raises(UnreadablePage, match="the metrics page has no"):
            readings(page)


def test_labels_choose_series_and_are_unescaped():
    page = 'm{a="x\\"y",b="1"} 2\nm{a="z",b="1"} 3\nm{b="1"} 4\n'
    metrics = EngineMetrics(
        running=(Metric(name="m", labels={"a": 'x"y'}),), waiting=(Metric(name="m"),), kv_usage=Metric(name="k")
    )
    found = readings(page + "k 0.5 1700000000000\n", metrics)
    assert (found.running, found.waiting) == (2, 9)


def fed(piece: bytes, times: int) -> None:
    reader = PageReader(wanted_names(VLLM))
    for _ in range(times):
        reader.feed(piece)


@pytest.mark.parametrize(
    ("piece", "times"),
    [
        (b"x" * (MOST_LINE_BYTES + 1), 1),
        (b"vllm:num_requests_running 1\n" * MOST_SERIES, 2),
        (b'vllm:num_requests_running{a="' + b"x" * 15_000 + b'"} 1\n', 100),
        (b"# comment\n" * 6554, MOST_PAGE_BYTES // 2**16 + 1),
    ],
    ids=["line", "series", "long series", "page"],
)
def test_what_is_too_long_is_refused_before_it_is_kept(piece: bytes, times: int):
    with pytest.raises(UnreadablePage):
        fed(piece, times)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.integers(min_value=1, max_value=40))
def test_any_bytes_in_any_chunks_are_numbers_or_an_unreadable_page(noise: bytes, size: int):
    page = noise + b"\n" + vllm_page().encode()[:2000] + noise
    chunks = [page[at : at + size] for at in range(0, len(page), size)]
    whole, parts = PageReader(wanted_names(VLLM)), PageReader(wanted_names(VLLM))
    results = []
    for reader, given_chunks in ((whole, [page]), (parts, chunks)):
        try:
            for chunk in given_chunks:
                reader.feed(chunk)
            results.append(reader.finish())
        except UnreadablePage:
            results.append(None)
    assert results[0] == results[1]


def test_the_agents_page_has_the_names_of_our_runtime_and_leaves_out_what_the_engine_lacks():
    reader = PageReader(metrics_page.all_names(SGLANG))
    reader.feed((RECORDED / "sglang-metrics.txt").read_bytes())
    page = metrics_page.render(reader.finish(), SGLANG, 'a "model"').decode()
    assert 'vllm:num_requests_running{model_name="a \\"model\\""} 3.0' in page
    assert 'vllm:kv_cache_usage_perc{model_name="a \\"model\\""} 0.5' in page
    assert 'vllm:time_to_first_token_seconds_bucket{model_name="a \\"model\\"",le="0.1"} 5.0' in page
    assert "prefix_cache" not in page
    assert metrics_page.render({}, SGLANG, "") == b"\n"


def test_a_series_has_the_labels_that_are_asked_of_it():
    series = Series({"a": "1", "b": "2"}, 0)
    assert series.has({})
    assert series.has({"a": "1"})
    assert not series.has({"a": "2"})
    assert not series.has({"c": ""})
