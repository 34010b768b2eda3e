"""The device's memory does not last for a step: who was in it is told, and the others get what they always got."""

import pytest
import structlog

from slipway_runtime.engine.engine import MAX_OOM_STEPS
from slipway_runtime.messages import FinishReason, Request, SamplingParams
from slipway_runtime.worker.out_of_memory import StepOutOfMemoryError
from tests.runtime.engine.everything import GRAMMAR, Model, Served, a_model
from tests.runtime.engine.failing_allocations import STOLEN, failing


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return a_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "overlapped"])
def served(request: pytest.FixtureRequest, model: Model) -> Served:
    return Served(model, overlap=request.param, max_num_seqs=3, max_num_batched_tokens=128, max_adapters=2, max_rank=8)


def ask(served: Served, id: str, *, first: int = 7, **fields: object) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompt = tuple((first * 100 + n) % 3000 + 3 for n in range(40))
    served.engine.add(Request(id=id, prompt_token_ids=prompt, params=params, arrived=0.0, **fields), 0.0)


def alone(served: Served, **fields: object) -> list[int]:
    served.outputs.clear()
    ask(served, "alone", **fields)
    served.finish()
    return served.tokens("alone")


def reasons(served: Served) -> dict[str, FinishReason | None]:
    return {id: outputs[-1].finish_reason for (id, _), outputs in served.outputs.items()}


@pytest.mark.capability("OB-8")
def test_requests_in_the_step_end_and_waiting_ones_are_answered_as_always(served: Served):
    wanted = {first: alone(served, first=first) for first in (1, 4)}
    served.engine._scheduler.forget_prefixes()
    served.outputs.clear()
    for id, first in (("a", 1), ("b", 2), ("c", 3)):
        ask(served, id, first=first)
    for _ in range(4):
        served.engine.step(0.0)
    ask(served, "waits", first=4)
    before = served.engine.stats(0.0)

    with failing(served.engine, 1), structlog.testing.capture_logs() as logged:
        served.finish()
    ask(served, "again", first=1)  # its prefixes were published before, and what was half written since is not found
    served.finish()

    lost, kept = FinishReason.OUT_OF_MEMORY, FinishReason.LENGTH
    assert reasons(served) == {"a": lost, "b": lost, "c": lost, "waits": kept, "again": kept}
    assert {outputs[-1].error for (id, _), outputs in served.outputs.items() if id in "abc"} == {
        "out of memory in a step"
    }
    assert (served.tokens("waits"), served.tokens("again")) == (wanted[4], wanted[1])
    after = served.engine.stats(0.0)
    assert (after.aborted - before.aborted, after.finished - before.finished, after.blocks_live) == (3, 2, 0)
    [line] = logged
    assert (line["event"], line["log_level"], line["ended"]) == ("out of memory in a step", "error", 3)
    assert line["reason"] == STOLEN.splitlines()[0]


@pytest.mark.capability("OB-8")
def test_grammars_adapters_and_answers_that_share_a_prompt_are_given_back(served: Served):
    with_adapter = alone(served, adapter=served.digests[1], first=5)
    served.outputs.clear()
    ask(served, "bound", grammar=GRAMMAR)
    ask(served, "many", first=6, n=4)
    ask(served, "other", first=5, adapter=served.digests[2])

    with failing(served.engine, 1):
        served.finish()
    lost = {id for id, reason in reasons(served).items() if reason is FinishReason.OUT_OF_MEMORY}
    ask(served, "same", first=5, adapter=served.digests[1])
    served.finish()

    assert {"bound", "other"} <= lost
    assert len(served.engine._grammars) == 0
    assert served.tokens("same") == with_adapter
    assert served.engine.stats(0.0).blocks_live == 0


@pytest.mark.capability("OB-8")
def test_an_engine_that_never_has_enough_ends_and_any_other_failure_ends_it_at_once(model: Model):
    served = Served(model, max_num_seqs=1)
    with failing(served.engine, MAX_OOM_STEPS + 1):
        for number in range(MAX_OOM_STEPS):
            ask(served, f"a{number}")
            served.finish()
        ask(served, "last")
        with pytest.raises(StepOutOfMemoryError, match=r"^CUDA out of memory\. Tried to allocate 2\.00 GiB"):
            served.finish()
    assert set(reasons(served).values()) == {FinishReason.OUT_OF_MEMORY}

    served = Served(model, max_num_seqs=1)
    with failing(served.engine, MAX_OOM_STEPS):
        for number in range(MAX_OOM_STEPS):
            ask(served, f"b{number}")
            served.finish()
    ask(served, "has enough")
    served.finish()
    assert served.engine._oom_steps == 0
    ask(served, "c")
    with (
        failing(served.engine, 1, lambda: RuntimeError("shapes differ")),
        pytest.raises(RuntimeError, match="shapes differ"),
    ):
        served.finish()
