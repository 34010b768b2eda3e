"""The warm-up has every kernel compiled that requests may launch: no first request waits for a compiler."""

import random
from collections.abc import Callable

import pytest

from bench.gpu_steps import BLOCK, a_machine
from slipway_runtime.engine.warmup import warm_up
from slipway_runtime.messages import Request, SamplingParams
from slipway_runtime.scheduling.block_pool import BlockPool
from slipway_runtime.scheduling.residency import Residency
from slipway_runtime.scheduling.scheduler import Scheduler
from slipway_runtime.worker.capture import CapturedGraph

ROWS, LONGEST, CHUNK = 8, 4096, 512
KINDS = {
    "plain": {},
    "KV int8": {"kv_dtype": "int8"},
    "int8 weights, graphs and adapters": {"quantization": "int8", "graphs": True, "adapters": 2},
    "no prefix cache": {},
}


def a_scheduler(adapters: int, *, shares_prefixes: bool = True) -> Scheduler:
    pool = BlockPool(ROWS * LONGEST // BLOCK, BLOCK, shares_prefixes=shares_prefixes)
    residency = None
    if adapters:
        residency = Residency(pool, max_adapters=adapters, max_cpu_adapters=adapters, block_bytes=0)
    scheduler = Scheduler(
        pool, max_num_seqs=ROWS, max_num_batched_tokens=CHUNK, max_model_len=LONGEST, eos_token_ids=frozenset(),
        model="m", speculation_max_tokens=4, residency=residency,
    )  # fmt: skip
    for slot in range(adapters):
        scheduler.register_adapter(f"adapter-{slot}", 0.0)
        scheduler.note_adapter_loaded(f"adapter-{slot}", 0.0, num_bytes=0, rank=16)
    return scheduler


def requests(draw: random.Random, adapters: int) -> list[Request]:
    def one(index: int) -> Request:
        params = SamplingParams(
            max_tokens=draw.randint(1, 12), temperature=draw.choice((0.0, 0.7, 1.0)), top_p=draw.choice((1.0, 0.9)),
            top_k=draw.choice((0, 7)), min_p=draw.choice((0.0, 0.1)), ignore_eos=True,
            repetition_penalty=draw.choice((1.0, 1.0, 1.1)), frequency_penalty=draw.choice((0.0, 0.0, 0.2)),
            min_tokens=draw.choice((0, 1)), logprobs=draw.choice((None, None, 3)),
            logit_bias=draw.choice(((), ((5, 1.0),))), stop_token_ids=draw.choice(((), (9,))),
        )  # fmt: skip
        length = draw.choice((1, 2, 15, 16, 17, 100, 300, 511, 1500, 3000))
        tokens = tuple(draw.choice(((7,) * length, tuple(draw.randrange(1000) for _ in range(length)))))
        adapter = draw.choice(("", *(f"adapter-{slot}" for slot in range(adapters))))
        return Request(id=f"r{index}", prompt_token_ids=tokens, params=params, arrived=0.0, adapter=adapter)

    return [one(index) for index in range(24)]


@pytest.mark.capability("KN-4", "PF-8")
@pytest.mark.parametrize("kind", KINDS)
def test_requests_launch_nothing_that_the_warm_up_did_not_compile(kind):
    """Few new tokens on a long context were never warmed, and compiled the attention of whole prompts once more."""
    settings = {name: value for name, value in KINDS[kind].items() if name != "graphs"}
    adapters = settings.get("adapters", 0)
    with a_machine(rows=ROWS, longest=LONGEST, layers=1, **settings) as machine:
        gpu, runner, vocabulary = machine.gpu, machine.runner, machine.config.vocab_size
        digests = tuple(f"adapter-{slot}" for slot in range(adapters))
        shares = kind != "no prefix cache"
        warm_up(a_scheduler(adapters, shares_prefixes=shares), runner.execute, vocab_size=vocabulary, adapters=digests)
        if "graphs" in KINDS[kind]:  # captured afterwards, as by the engine

            def capture(compute: Callable[[], object]) -> CapturedGraph:
                compute()
                return gpu.capture(compute)

            runner.capture_graphs(capture)
        warm = set(gpu.compiled)
        scheduler, draw = a_scheduler(adapters, shares_prefixes=shares), random.Random(3)
        for request in requests(draw, adapters):
            scheduler.add(request, 0.0)
        steps = 0
        while scheduler.has_work:
            plan = scheduler.schedule(0.0)
            scheduler.update(runner.execute(plan), 0.0)
            steps += 1
        assert steps > 10
        assert {key[0] for key in warm} >= {"_extend", "_best_of_rows", "_rope_and_store"}
        assert sorted(map(str, gpu.compiled - warm)) == []
