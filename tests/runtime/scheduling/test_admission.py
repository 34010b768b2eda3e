"""A bounded queue: who may wait, and when the others should come back."""

import pytest

from slipway_runtime.messages import EngineFacts, EngineStats, Request, SamplingParams
from slipway_runtime.scheduling.admission import Admission, Overloaded, QueueLimits, Refused, refuse_impossible

FACTS = EngineFacts(
    vocab_size=100, eos_token_ids=(2,), max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16, block_size=16,
    num_blocks=4, bytes_per_token=1, weight_bytes=1, dtype="float32", device="cpu", load_seconds=0, warmup_seconds=0,
)  # fmt: skip


def stats(started: int, waiting: int, computed_tokens: int = 0) -> EngineStats:
    return EngineStats(
        running=4, waiting=waiting, waiting_tokens=0, blocks_total=4, blocks_live=0, blocks_cached=0, steps=1,
        preemptions=0, prefix_queries=0, prefix_hits=0, admitted=0, finished=0, aborted=0, handed_over=0,
        last_step_at=0.0, started=started, computed_tokens=computed_tokens,
    )  # fmt: skip


def a_queue_that_starts(per_second: float, waiting: int = 10, seconds: int = 8, **limits: object) -> Admission:
    admission = Admission(QueueLimits(**limits), max_num_seqs=2)
    for second in range(seconds + 1):
        admission.observe(stats(started=int(per_second * second), waiting=waiting), float(second))
    return admission


@pytest.mark.capability("BS-4")
def test_an_empty_queue_lets_everybody_in():
    admission = Admission(QueueLimits(max_requests=1, max_tokens=1), max_num_seqs=2)
    admission.admit(waiting=0, waiting_tokens=0, prompt_tokens=99, now=0.0)


@pytest.mark.capability("BS-4")
def test_a_full_queue_says_when_half_of_it_will_be_gone():
    admission = a_queue_that_starts(per_second=2, max_requests=10)
    with pytest.raises(Overloaded, match="10 requests are waiting, the queue holds 10") as refusal:
        admission.admit(waiting=10, waiting_tokens=0, prompt_tokens=1, now=8.0)
    assert refusal.value.retry_after_seconds == 2.5  # ten at two a second are five seconds


@pytest.mark.capability("BS-4")
def test_tokens_bound_the_queue_too():
    admission = a_queue_that_starts(per_second=2, max_tokens=1000)
    admission.admit(waiting=3, waiting_tokens=900, prompt_tokens=100, now=8.0)
    with pytest.raises(Overloaded, match="900 prompt tokens are waiting"):
        admission.admit(waiting=3, waiting_tokens=900, prompt_tokens=101, now=8.0)


@pytest.mark.capability("BS-4")
def test_long_prompts_ahead_mean_a_longer_wait_than_their_number_says():
    admission = Admission(QueueLimits(max_wait_seconds=8), max_num_seqs=2)
    for second in range(5):
        admission.observe(stats(started=2 * second, waiting=3, computed_tokens=1000 * second), float(second))
    assert admission.predicted_wait_seconds(3, 4.0) == 1.5
    assert admission.predicted_wait_seconds(3, 4.0, waiting_tokens=9000) == 9.0
    with pytest.raises(Overloaded, match="about 9 s, the limit is 8 s") as refusal:
        admission.admit(waiting=3, waiting_tokens=9000, prompt_tokens=1, now=4.0)
    assert refusal.value.retry_after_seconds == 4.5


@pytest.mark.capability("BS-4")
def test_a_request_that_would_wait_too_long_is_refused_at_once():
    admission = a_queue_that_starts(per_second=0.5, max_wait_seconds=30)
    admission.admit(waiting=15, waiting_tokens=0, prompt_tokens=1, now=8.0)
    with pytest.raises(Overloaded, match="about 32 s, the limit is 30 s") as refusal:
        admission.admit(waiting=16, waiting_tokens=0, prompt_tokens=1, now=8.0)
    assert refusal.value.retry_after_seconds == 16


@pytest.mark.capability("BS-4")
def test_a_queue_that_stands_still_gets_longer_waits_the_longer_it_stands():
    admission = a_queue_that_starts(per_second=0, waiting=5)
    assert admission.predicted_wait_seconds(1, 8.0) == 8
    assert admission.predicted_wait_seconds(5, 2.0) == 5  # two and a half batches of two seconds
    assert admission.predicted_wait_seconds(5, 8.0) == 20


@pytest.mark.capability("BS-4")
def test_an_empty_moment_forgets_the_old_pace():
    admission = a_queue_that_starts(per_second=0, waiting=5)
    admission.observe(stats(started=5, waiting=0), 9.0)
    admission.observe(stats(started=5, waiting=5), 10.0)
    admission.observe(stats(started=15, waiting=5), 11.0)
    assert admission.predicted_wait_seconds(5, 11.0) == 0.5


@pytest.mark.capability("BS-4")
def test_a_burst_after_a_long_silence_is_let_in():
    admission = Admission(QueueLimits(max_wait_seconds=1), max_num_seqs=2)
    admission.observe(stats(started=3, waiting=0), 1.0)
    for waiting in range(100):
        admission.admit(waiting=waiting, waiting_tokens=0, prompt_tokens=9, now=1000.0 + waiting / 1e6)


@pytest.mark.capability("BS-4")
def test_the_time_to_come_back_is_between_a_second_and_a_minute():
    for pace in (0, 1000):
        with pytest.raises(Overloaded) as refusal:
            a_queue_that_starts(per_second=pace, max_requests=5, waiting=500).admit(
                waiting=500, waiting_tokens=0, prompt_tokens=1, now=8.0
            )
        assert 1 <= refusal.value.retry_after_seconds <= 60


@pytest.mark.parametrize(
    ("prompt", "fields", "sentence"),
    [
        ((), {}, "the prompt is empty"),
        (range(64), {}, "64 tokens; this model takes 64"),
        ((1,), {"max_tokens": 0}, "max_tokens is 0"),
        ((1, 100), {}, "prompt holds a token id outside the vocabulary of 100"),
        ((-1,), {}, "prompt holds a token id outside"),
        ((1,), {"n": 0}, "n is 0"),
        ((1,), {"n": 2, "output_token_ids": (3,)}, "started elsewhere"),
        ((1,), {"output_token_ids": (100,)}, "output_token_ids holds a token id outside"),
        ((1,), {"stop_token_ids": (100,)}, "stop_token_ids holds a token id outside"),
    ],
)
@pytest.mark.capability("KV-6")
def test_what_can_never_run_is_refused_before_it_is_queued(prompt, fields, sentence):
    of_request = {name: fields[name] for name in fields if name in Request.__struct_fields__}
    params = SamplingParams(**{"max_tokens": 1, **{name: fields[name] for name in fields if name not in of_request}})
    request = Request(id="a", prompt_token_ids=tuple(prompt), params=params, arrived=0.0, **of_request)
    with pytest.raises(Refused, match=sentence):
        refuse_impossible(request, FACTS)
