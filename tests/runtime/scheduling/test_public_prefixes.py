"""The prompts that a service was started with are found by every tenant, and open no way from one to another."""

import pytest

from slipway_runtime.messages import BlockStored
from tests.runtime.paper_worker import Play, continuation

SYSTEM = list(range(1, 17))  # four blocks, the service's own
QUESTION = list(range(20, 28))  # two blocks, of a tenant


def cached(play: Play, name: str, prompt: list[int], **fields: object) -> int:
    play.add(name, prompt, max_tokens=2, **fields)
    play.run()
    assert play.text(name) == continuation(prompt, 2, str(fields.get("adapter", "")))
    return play.outputs[name][0].cached_tokens


@pytest.mark.capability("BS-7", "MT-2", "KV-3")
def test_each_tenant_finds_the_services_prompt_and_nobody_finds_what_another_tenant_asked():
    play = Play(blocks=64, budget=64)
    cached(play, "warm", SYSTEM, public=True)
    prompt = [*SYSTEM, *QUESTION, 30]

    assert cached(play, "a", prompt, cache_salt="a") == 16
    assert cached(play, "b", prompt, cache_salt="b") == 16, "a's question is a's"
    assert cached(play, "unsalted", prompt) == 16
    assert cached(play, "a again", prompt, cache_salt="a") == 24, "its own question, after the public beginning"
    assert cached(play, "warm again", prompt, public=True) == 16, "what tenants ask is not published for all"


@pytest.mark.capability("MT-2", "KV-3")
def test_what_is_not_the_services_own_is_never_public():
    play = Play(blocks=64, budget=64)
    assert cached(play, "a", SYSTEM, cache_salt="a") == 0
    assert cached(play, "unsalted", SYSTEM) == 0
    assert cached(play, "named so", SYSTEM, cache_salt="public") == 0
    assert cached(play, "b", SYSTEM, cache_salt="b") == 0
    assert cached(play, "warm", SYSTEM, public=True) == 0, "no prompt of a tenant tells how fast the boot was"


@pytest.mark.capability("ML-6", "KV-3")
def test_an_adapter_computes_other_values_and_finds_nothing():
    play = Play(blocks=64, budget=64, residency={"max_adapters": 1})
    play.load("sha256:x")
    cached(play, "warm", SYSTEM, public=True)
    assert cached(play, "base", [*SYSTEM, 30], cache_salt="a") == 16
    assert cached(play, "adapted", [*SYSTEM, 30], cache_salt="a", adapter="sha256:x") == 0


def test_a_tenants_longer_prefix_goes_before_a_shorter_public_one():
    play = Play(blocks=64, budget=64)
    prompt = [*SYSTEM, *QUESTION, 30]
    cached(play, "a", prompt, cache_salt="a")
    cached(play, "warm", SYSTEM, public=True)
    assert cached(play, "a again", prompt, cache_salt="a") == 24


@pytest.mark.capability("KV-8")
def test_a_router_can_follow_a_tenants_chain_back_into_the_public_one():
    play = Play(blocks=64, budget=64, kv_events=True)
    cached(play, "warm", SYSTEM, public=True)
    (public,) = play.scheduler.take_kv_events()
    cached(play, "a", [*SYSTEM, *QUESTION, 30], cache_salt="a")
    (own,) = play.scheduler.take_kv_events()
    assert isinstance(public, BlockStored)
    assert isinstance(own, BlockStored)
    assert public.parent_block_hash is None
    assert own.parent_block_hash == public.block_hashes[-1]
    assert own.token_ids == tuple(QUESTION)
