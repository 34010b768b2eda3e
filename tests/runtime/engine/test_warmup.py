"""After the warm-up no request reaches a path for the first time, and out of memory is one sentence."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

import msgspec
import pytest
import torch

from slipway_runtime.engine.build import build_engine
from slipway_runtime.engine.engine import Engine
from slipway_runtime.messages import Grammar, LoadAdapter, Request, SamplingParams
from slipway_runtime.models.adapter_files import adapter_digest
from slipway_runtime.models.config import ModelRefusedError
from slipway_runtime.worker.out_of_memory import oom_refused
from slipway_runtime.worker.runner import Runner

TINY = Path(__file__).parents[3] / "models" / "tiny"
ADAPTERS = TINY.parent / "adapters"
COMPUTING = ("/slipway_runtime/worker/", "/slipway_runtime/layers/", "/slipway_runtime/kernels/", "/models/decoder.py")


@contextmanager
def functions_called() -> Iterator[set[CodeType]]:
    """The functions of everything that computes, as they are entered on this thread."""
    called: set[CodeType] = set()

    def see(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and any(part in frame.f_code.co_filename for part in COMPUTING):
            called.add(frame.f_code)

    before: Callable[..., object] | None = sys.getprofile()
    sys.setprofile(see)
    try:
        yield called
    finally:
        sys.setprofile(before)


def run(engine: Engine, *requests: tuple[int, SamplingParams, Grammar | None], adapters: tuple[str, ...] = ()) -> None:
    """adapters: of the first requests."""
    for index, (length, params, grammar) in enumerate(requests):
        prompt = tuple(3 + n % 50 for n in range(length))
        request = Request(id=f"r{index}", prompt_token_ids=prompt, params=params, arrived=0.0, grammar=grammar)
        engine.add(msgspec.structs.replace(request, adapter=adapters[index] if index < len(adapters) else ""), 0.0)
    while engine.has_work:
        engine.step(0.0)


def loaded(engine: Engine, path: Path) -> str:
    """The digest of an adapter that is in host memory now."""
    heard = threading.Event()
    engine.attach(heard.set)
    engine.control(LoadAdapter(call=1, digest=adapter_digest(path), path=str(path)), 0.0)
    assert heard.wait(60)
    (reply,) = engine.step(0.0).replies
    assert not reply.error
    return adapter_digest(path)


@pytest.mark.capability("KN-4", "PF-8")
@pytest.mark.parametrize(
    "settings",
    [{}, {"speculation": "promptLookup"}, {"deterministic": True}, {"kv_cache_dtype": "int8"}, {"max_adapters": 2}],
    ids=str,
)
def test_no_request_reaches_a_function_that_the_warm_up_did_not(settings: dict[str, object]):
    with functions_called() as warm:
        engine = build_engine(
            TINY, max_num_seqs=4, max_num_batched_tokens=256, kv_cache_bytes=32 << 20, device="cpu", **settings
        )
    assert len(warm) > 20, "the warm-up was seen"
    greedy, sampled = SamplingParams(max_tokens=6, temperature=0.0), SamplingParams(max_tokens=6, seed=3)
    with functions_called() as served:
        run(engine, (1, greedy, None))
        run(engine, (700, greedy, None), (5, sampled, None))
        run(engine, (900, greedy, None))
        run(engine, (900, greedy, None))  # a prefix hit
        run(engine, (30, SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True), None))
        run(
            engine,
            (9, SamplingParams(max_tokens=3, top_k=4, min_p=0.1, top_p=0.5, logprobs=2), None),
            (3, greedy, None),
        )
        run(
            engine,
            (9, SamplingParams(max_tokens=3, repetition_penalty=1.2, min_tokens=2, logit_bias=((5, 2.0),)), None),
        )
        run(engine, (40, SamplingParams(max_tokens=2, prompt_logprobs=3), None))
        run(engine, (4, sampled, Grammar(kind="choice", text='["yes", "no"]')), (4, greedy, None))
        if "max_adapters" in settings:
            adapters = [loaded(engine, path) for path in sorted(ADAPTERS.iterdir())]
            run(engine, (9, greedy, None), adapters=(adapters[0],))
            run(engine, (70, greedy, None), (40, sampled, None), (5, greedy, None), adapters=tuple(adapters))
    new = {f"{code.co_filename.rpartition('/')[2]}:{code.co_qualname}" for code in served - warm}
    assert not new, "these were reached for the first time by a user"


@pytest.mark.capability("KN-4", "KV-5")
@pytest.mark.parametrize("most", [1, 4, 7])
def test_the_warm_up_verifies_as_many_drafts_as_a_step_may_hold(most, monkeypatch):
    """The first step of many users with drafts found less memory than the warm-up had proven."""
    samples, execute = [], Runner.launch

    def launch(runner, plan, masks=None):
        samples.append(sum(1 + len(drafts) for drafts in plan.drafts))
        return execute(runner, plan, masks)

    monkeypatch.setattr(Runner, "launch", launch)
    build_engine(
        TINY, max_num_seqs=5, max_num_batched_tokens=64, kv_cache_bytes=8 << 20, device="cpu",
        speculation="promptLookup", speculation_max_tokens=most,
    )  # fmt: skip
    assert max(samples) == 5 * (1 + most)


@pytest.mark.capability("PF-30", "KV-5")
def test_out_of_memory_is_told_as_what_was_being_done():
    with (
        pytest.raises(ModelRefusedError, match="not enough memory on cpu for the KV cache: give the container more"),
        oom_refused("the KV cache", torch.device("cpu")),
    ):
        torch.empty(1 << 55)
    with (
        pytest.raises(ModelRefusedError, match="on cuda for the graphs: lower gpuMemoryUtilization"),
        oom_refused("the graphs", torch.device("cuda")),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    with pytest.raises(RuntimeError, match="shapes differ"), oom_refused("x", torch.device("cpu")):
        raise RuntimeError("shapes differ")
