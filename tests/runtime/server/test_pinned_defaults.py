"""Pinned sampling defaults: who asks for nothing gets the same answer from every start of a replica."""

import pytest

from slipway_runtime.settings import SamplingDefaults
from tests.runtime.server.serving import a_replica

PINNED = SamplingDefaults(temperature=0.0, top_p=0.9, top_k=20, min_p=0.05, repetition_penalty=1.2, max_tokens=24)


@pytest.mark.capability("PF-14")
async def test_a_request_without_parameters_gets_the_same_answer_after_a_restart():
    starts = []
    for batch in (64, 16):  # what is not pinned may change with a version
        async with a_replica(defaults=PINNED, deterministic=True, max_num_batched_tokens=batch) as replica:
            plain = (await replica.chat("Tell me a story about a fox.")).json()
            seeded = (await replica.chat("Tell me a story.", temperature=1.0, seed=5)).json()
            own = (await replica.chat("Tell me a story about a fox.", repetition_penalty=1.0)).json()
            starts.append([answer["choices"][0]["message"]["content"] for answer in (plain, seeded, own)])
            assert plain["usage"]["completion_tokens"] <= 24
    assert starts[0] == starts[1]
    plain, _, own = starts[0]
    assert plain != own, "the pinned values are what was used, unless a request has its own"


@pytest.mark.capability("PF-14")
def test_a_model_cannot_change_what_is_pinned():
    newer = SamplingDefaults(temperature=1.5, top_p=0.1, top_k=1, min_p=0.9, repetition_penalty=2.0, max_tokens=1)
    assert PINNED.over(newer) == PINNED
    assert SamplingDefaults(temperature=0.2).over(newer).top_p == 0.1
