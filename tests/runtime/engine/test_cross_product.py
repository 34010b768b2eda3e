"""Features hold together: adapters, rounded weights, rounded KV, draft tokens, prefixes, grammars, overlap and several
answers at once give each request the tokens that it gets alone, without any of the fast paths.

Six configurations in which each two features meet on and off (tested below), one with all of them, one in fp8, one with
host memory for cold prefixes. Each is compared with a plain engine of the same weights and number formats, which
answers one request after the other.
"""

import json
from collections.abc import Iterator
from itertools import combinations, product
from typing import NamedTuple

import msgspec
import pytest

from slipway_runtime.messages import FinishReason, Request, ResetPrefixCache, SamplingParams
from tests.runtime.engine.everything import COMPILER, EOS, GRAMMAR, NO_SPACES, Model, Served, a_model

ROUNDING = 1e-3  # of logits around 10, in fp32: sums depend on the shape of the batch


class Features(NamedTuple):
    """One configuration: what is on."""

    lora: bool = False
    quantized: bool = False
    int8_kv: bool = False
    speculation: bool = False
    prefix_hit: bool = False
    grammar: bool = False
    overlap: bool = False
    several: bool = False
    weights: str = "int8"  # what quantized means
    deterministic: bool = True
    host: bool = False  # prefixes are evicted to host memory before they are hit

    @property
    def numerics(self) -> dict[str, object]:
        """What no fast path can change."""
        return {
            "max_adapters": 2 if self.lora else 0,
            "max_rank": 8 if self.lora else 0,
            "quantization": self.weights if self.quantized else "none",
            "kv_cache_dtype": "int8" if self.int8_kv else "auto",
            "deterministic": self.deterministic,
        }


def name_of(features: Features) -> str:
    on = [name for name, value in features._asdict().items() if value is True and name != "deterministic"]
    return "-".join(on) + ("-fp8" if features.weights == "fp8" else "") or "none"


NUM_FEATURES = 8
# Sets of three out of five: no two are the same, none holds another, and each two meet. With the row of zeros, each
# two columns take all four values.
COLUMNS = list(combinations(range(5), 3))[:NUM_FEATURES]
PAIRWISE = [Features(), *(Features(*(row in column for column in COLUMNS)) for row in range(5))]
ALL_ON = Features(*[True] * NUM_FEATURES)
CONFIGURATIONS = [*PAIRWISE, ALL_ON, ALL_ON._replace(weights="fp8"), ALL_ON._replace(host=True)]


def test_each_two_features_meet_in_all_four_ways():
    for first, second in combinations(range(NUM_FEATURES), 2):
        assert {(c[first], c[second]) for c in PAIRWISE} == set(product((False, True), repeat=2))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return a_model(tmp_path_factory.mktemp("cross"))


@pytest.fixture(scope="module")
def plain(model: Model) -> Iterator[dict[tuple[object, ...], "Served"]]:
    """Engines without a fast path, by their numerics."""
    engines: dict[tuple[object, ...], Served] = {}
    yield engines
    engines.clear()


def requests(features: Features, digests: list[str]) -> list[Request]:
    """Four prompts that repeat themselves, so that drafts exist; greedy and sampled, base and adapters."""
    asked = []
    for number in range(4):
        shared = [(3 + number * 41 + position % 9 * 7) % 3000 + 3 for position in range(36)]
        params = SamplingParams(
            max_tokens=28 if features.grammar else 14,
            temperature=0.7 if number == 3 and features.deterministic else 0.0,
            seed=number,
            ignore_eos=not features.grammar,
            logit_bias=NO_SPACES if features.grammar else (),
            logprobs=None if features.deterministic else 2,
        )
        asked.append(
            Request(
                id=f"r{number}",
                prompt_token_ids=(*shared, 100 + number),
                params=params,
                arrived=0.0,
                adapter=digests[number % len(digests)],
                grammar=GRAMMAR if features.grammar and number != 2 else None,
                n=2 if features.several else 1,
            )
        )
    return asked


def answered_together(model: Model, features: Features) -> Served:
    """All at once, with every fast path that is on."""
    drafted = {"speculation": "promptLookup", "speculation_max_tokens": 3} if features.speculation else {}
    host = {"kv_cache_host_bytes": 1 << 20} if features.host else {}
    served = Served(model, overlap=features.overlap, **drafted, **host, **features.numerics)
    asked = requests(features, served.digests)
    if features.prefix_hit:
        for request in asked:
            params = SamplingParams(max_tokens=1, temperature=0.0)
            before = Request(
                id=f"before {request.id}",
                prompt_token_ids=request.prompt_token_ids,
                params=params,
                arrived=0.0,
                adapter=request.adapter,
            )
            served.engine.add(before, 0.0)
        served.finish()
    if features.host:
        pool = served.engine._scheduler.pool
        while pool.cached:
            pool.evict_next()
    for request in asked:
        served.engine.add(request, 0.0)
    served.finish()
    return served


def answered_alone(model: Model, features: Features, plain: dict[tuple[object, ...], Served]) -> Served:
    """One answer after the other, each from nothing."""
    key = tuple(features.numerics.values())
    if key not in plain:
        plain[key] = Served(model, overlap=False, **features.numerics)
    served = plain[key]
    served.outputs.clear()
    for request in requests(features, served.digests):
        for index in range(request.n):
            served.engine.control(ResetPrefixCache(call=0), 0.0)
            served.engine.add(one_answer(request, index), 0.0)
            served.finish()
    return served


def one_answer(request: Request, index: int) -> Request:
    params = msgspec.structs.replace(request.params, seed=request.params.seed + index)
    return msgspec.structs.replace(request, id=f"{request.id}/{index}", n=1, params=params)


def check_request_table(served: Served, features: Features) -> None:
    stats = served.engine.stats(0.0)
    assert stats.admitted == stats.finished + stats.aborted + stats.handed_over
    assert stats.aborted == stats.running == stats.waiting == stats.blocks_live == stats.invalid_kv_blocks == 0
    first = [served.outputs[f"r{number}", 0][0] for number in range(4)]
    assert all((output.cached_tokens > 0) == features.prefix_hit for output in first)
    assert (stats.draft_tokens > 0) == features.speculation
    assert (stats.promotions > 0) == features.host
    assert len(served.engine._grammars) == 0


def check_answers(served: Served) -> None:
    """Every answer with a grammar matches it from the first token to the last."""
    for number in (0, 1, 3):
        for (id, index), outputs in served.outputs.items():
            if id == f"r{number}":
                assert outputs[-1].finish_reason is FinishReason.STOP
                said = COMPILER.vocabulary.decode_str([t for t in served.tokens(id, index) if t != EOS])
                answer = json.loads(said)
                assert isinstance(answer["glad"], bool)
                assert answer["kind"] in ("cat", "dog", "fox")


@pytest.mark.capability("QZ-3", "API-19", "SD-1", "BS-7", "KV-12")
@pytest.mark.parametrize("features", CONFIGURATIONS, ids=name_of)
def test_with_all_fast_paths_each_request_says_what_it_says_alone(features, model, plain):
    together, alone = answered_together(model, features), answered_alone(model, features, plain)
    for id, index in together.outputs:
        if id.startswith("r"):
            assert together.tokens(id, index) == alone.tokens(f"{id}/{index}"), (id, index)
    check_request_table(together, features)
    if features.grammar:
        check_answers(together)


@pytest.mark.capability("QZ-3", "API-19")
def test_without_determinism_answers_differ_only_where_two_tokens_are_closer_than_rounding(model, plain):
    features = ALL_ON._replace(quantized=False, int8_kv=False, grammar=False, deterministic=False)
    together, alone = answered_together(model, features), answered_alone(model, features, plain)
    compared = 0
    for id, index in together.outputs:
        if id.startswith("r"):
            scores = [score for output in alone.outputs[f"{id}/{index}", 0] for score in output.logprobs]
            for token, score in zip(together.tokens(id, index), scores, strict=True):
                compared += 1
                if token != score.token_id:
                    (_, best), (second, next_best) = score.top
                    assert token == second
                    assert best - next_best < ROUNDING
                    break
    assert compared > 80, "they are the same for long"
    check_request_table(together, features)
