"""Several answers to one prompt, answers begun elsewhere, and prompts that are scored."""

import tracemalloc

import pytest

from slipway_runtime.messages import FinishReason
from tests.runtime.paper_worker import Play, continuation

PROMPT = list(range(1, 11))  # two and a half blocks of four


@pytest.mark.capability("API-11", "KV-2")
@pytest.mark.parametrize("overlap", [False, True])
def test_answers_share_the_prompt_and_copy_only_the_block_that_both_would_write(overlap):
    play = Play(overlap=overlap, max_num_seqs=4, budget=32)
    play.add("a", PROMPT, max_tokens=9, n=3)
    play.run()
    copies = sum(len(plan.copies) for plan in play.all_plans)
    computed = sum(
        new for plan in play.all_plans for new, at in zip(plan.num_new, plan.num_computed, strict=True) if at < 10
    )
    assert copies == 2
    assert computed == 10 + 2, "the prompt once, and its last token for each of the others"
    for index in range(3):
        assert play.text("a", index) == continuation(PROMPT, 9, seed=index)
    stats = play.scheduler.stats(0.0)
    assert (stats.prompt_tokens, stats.prefix_queries) == (10, 10)
    assert stats.admitted == stats.finished == stats.started == 3


@pytest.mark.capability("API-11")
def test_answers_that_find_no_row_come_later_and_are_the_same():
    play = Play(max_num_seqs=1, budget=4)
    play.add("a", PROMPT, max_tokens=5, n=3)
    assert play.scheduler.stats(0.0).waiting == 3
    play.run()
    for index in range(3):
        assert play.text("a", index) == continuation(PROMPT, 5, seed=index)


@pytest.mark.capability("API-11", "API-7")
@pytest.mark.parametrize("steps", range(7))
@pytest.mark.parametrize("index", [0, 1, None])
def test_an_abort_ends_one_answer_or_all_in_any_state(steps, index):
    play = Play(max_num_seqs=2, budget=4)
    play.add("a", PROMPT, max_tokens=8, n=3)
    for _ in range(steps):
        play.step()
    play.abort("a", index)
    play.scheduler.check()
    play.run()
    assert play.pool.live == 0
    for answer in range(3):
        if index in (answer, None):
            assert play.end("a", answer).finish_reason is FinishReason.CANCELLED
        else:
            assert play.end("a", answer).finish_reason is FinishReason.LENGTH
            assert play.text("a", answer) == continuation(PROMPT, 8, seed=answer)


@pytest.mark.capability("API-19")
@pytest.mark.parametrize("given", range(1, 12))
def test_an_answer_begun_elsewhere_goes_on_as_if_it_had_been_here(given):
    whole = continuation(PROMPT, 12)
    play = Play()
    play.add("a", PROMPT, max_tokens=12, output_token_ids=tuple(whole[:given]))
    play.step()
    (new,) = play.plan.new_rows
    assert (new.num_prompt_tokens, len(new.token_ids)) == (10, 10 + given)
    play.run()
    assert play.text("a") == whole[given:], "what is known is not told again"
    assert play.scheduler.stats(0.0).generated_tokens == 12 - given


@pytest.mark.parametrize(("given", "reason"), [(12, FinishReason.LENGTH), (3, FinishReason.STOP)])
def test_an_answer_that_was_complete_on_another_replica_only_gets_its_final_output(given, reason):
    whole = continuation(PROMPT, 12)
    play = Play(eos=[whole[2]])
    play.add("a", PROMPT, max_tokens=12, output_token_ids=tuple(whole[:given]), ignore_eos=given == 12)
    play.run()
    assert [(o.token_ids, o.finish_reason) for o in play.outputs["a"]] == [((), reason)]


@pytest.mark.capability("API-11", "KV-8")
def test_a_scored_prompt_is_computed_whole_in_chunks_and_told_once():
    play = Play(budget=4)
    play.add("warm", PROMPT, max_tokens=1)
    play.run()
    play.add("a", PROMPT, max_tokens=3, prompt_logprobs=0)
    play.add("b", PROMPT, max_tokens=3)
    play.run()
    first, *others = play.outputs["a"]
    assert first.prompt_logprobs[0] is None
    assert [scored.token_id for scored in first.prompt_logprobs[1:]] == PROMPT[1:]
    assert all(output.prompt_logprobs is None for output in others)
    assert first.cached_tokens == 0
    assert play.outputs["b"][0].cached_tokens == 8


@pytest.mark.capability("SE-2")
def test_answers_that_wait_hold_no_copies_of_their_prompt():
    """The bound of the queue counts a prompt once: 128 copies of it would be memory that nothing bounds."""
    play = Play(blocks=8000, max_num_seqs=2)
    prompt = list(range(20_000))
    tracemalloc.start()
    play.add("a", prompt, max_tokens=2, n=128)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()

    assert used < 4 * 8 * len(prompt), "the request's own tuple and small parts of 128 answers"
    assert play.scheduler.stats(0.0).waiting == 128
    play.abort("a")
    play.run()
