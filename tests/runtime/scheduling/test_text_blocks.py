"""Text blocks of gateways follow the KV blocks that hold them: cached, evicted, in host memory, cleared."""

import random

import pytest

from slipway_api.text_blocks import TextBlocks, TextBlockUpdate
from slipway_runtime.messages import TextBlockChanges
from slipway_runtime.scheduling.block_pool import block_key, root_key
from tests.runtime.paper_worker import Play

SYSTEM = list(range(1, 17))  # four blocks of four tokens
NAMED = ((0, 100), (1, 101), (2, 102), (3, 103))


@pytest.mark.parametrize(
    ("num_tokens", "total_bytes", "count", "indexes"),
    [
        (64, 1024, 4, (0, 1, 2, 3)),  # four bytes a token: a text block of 64 bytes is one KV block of 16 tokens
        (65, 1024, 4, (1, 2, 3, 3)),  # each ends one token into the next KV block; the last, partial one is no block
        (128, 1024, 4, (1, 3, 5, 7)),  # two bytes a token
        (32, 1024, 4, (0, 0, 1, 1)),  # two text blocks in one KV block
        (15, 1024, 4, ()),  # no full KV block
        (64, 4096, 2, (0, 0)),
        (64, 1024, 0, ()),
    ],
)
def test_a_text_block_is_in_the_kv_block_at_its_share_of_the_prompt(num_tokens, total_bytes, count, indexes):
    blocks = TextBlocks(total_bytes, total_bytes // 4 if count == 4 else 256, tuple(range(count)))

    assert blocks.in_kv_blocks(num_tokens, 16) == tuple(zip(indexes, range(len(indexes)), strict=True))


@pytest.mark.parametrize("header", ["", "10", "a:256:", "256:256:AAA", "255:256:AAAAAAAAAAA=", "256:0:AAAAAAAAAAA="])
def test_a_header_that_is_none_is_refused(header):
    with pytest.raises(ValueError, match=r".+"):
        TextBlocks.of_header(header)


def test_headers_and_lines_come_back_as_they_were():
    blocks = TextBlocks(1000, 256, (0, 1, 2**64 - 1))
    update = TextBlockUpdate("boot.7", stored=(5, 2**64 - 1), removed=(6,), is_reset=True)

    assert TextBlocks.of_header(blocks.header()) == blocks
    assert TextBlockUpdate.of_line(update.line()) == update
    assert TextBlockUpdate.of_line(TextBlockUpdate("boot.8").line()) == TextBlockUpdate("boot.8")


def keys_of(prompt: list[int]) -> list[bytes]:
    """The keys of its full blocks."""
    keys = [root_key()]
    for start in range(0, len(prompt) - 3, 4):
        keys.append(block_key(keys[-1], prompt[start : start + 4]))
    return keys[1:]


def ask(play: Play, prompt: list[int], **fields: object) -> TextBlockChanges | None:
    """Play one request to its end; what it changed."""
    play.add(f"{len(play.outputs)}", prompt, max_tokens=1, **fields)
    play.run()
    return play.scheduler.take_text_blocks()


@pytest.mark.capability("KV-8", "RG-4")
def test_text_blocks_are_reported_once_cached_and_once_evicted():
    play = Play(blocks=12, budget=64)

    assert ask(play, [*SYSTEM, 20], text_blocks=NAMED) == TextBlockChanges(stored=(100, 101, 102, 103))
    assert ask(play, [*SYSTEM, 21], text_blocks=NAMED) is None, "known already"
    assert ask(play, [*SYSTEM, 22]) is None, "a request without text blocks finds the same KV and changes nothing"
    removed: set[int] = set()
    for number in range(12):
        changes = ask(play, [30 + number // 2] * 29)  # twice each: a prompt seen once evicts nothing that is reused
        removed |= set(changes.removed) if changes else set()
        found = play.pool.match(keys_of(SYSTEM))
        assert removed == {100 + index for index in range(len(found), 4)}, "exactly what the pool has evicted"
    assert removed
    assert ask(play, [*SYSTEM, 23], text_blocks=NAMED) == TextBlockChanges(stored=tuple(sorted(removed)))


@pytest.mark.capability("KV-8")
def test_text_blocks_of_a_prefix_that_others_computed_are_attached_to_it():
    play = Play(blocks=64, budget=64)
    ask(play, [*SYSTEM, 20])
    assert ask(play, [*SYSTEM, 21], text_blocks=NAMED[:2]) == TextBlockChanges(stored=(100, 101))
    play.scheduler.forget_prefixes()
    assert play.scheduler.take_text_blocks() == TextBlockChanges(removed=(100, 101))
    assert len(play.pool.text_blocks) == 0


@pytest.mark.capability("MT-2", "KV-3")
def test_a_public_prefix_and_a_tenants_own_carry_their_text_blocks():
    play = Play(blocks=64, budget=64)
    ask(play, SYSTEM, public=True)

    changes = ask(play, [*SYSTEM, *range(20, 24), 30], cache_salt="a", text_blocks=(*NAMED, (4, 104)))
    assert changes == TextBlockChanges(stored=(100, 101, 102, 103, 104))


@pytest.mark.capability("KV-12")
def test_what_moves_to_host_memory_is_still_cached():
    play = Play(blocks=12, budget=64, host_blocks=40)
    ask(play, [*SYSTEM, 20], text_blocks=NAMED)
    for number in range(2):
        assert ask(play, [30 + number] * 29) is None
    assert play.tier.held
    play.scheduler.forget_prefixes()
    assert play.scheduler.take_text_blocks() == TextBlockChanges(removed=(103, 102, 101, 100))


@pytest.mark.capability("KV-8")
@pytest.mark.parametrize("seed", range(4))
def test_after_any_schedule_a_router_knows_exactly_what_is_cached(seed):
    """Random conversations with and without text blocks, over too small a cache and a host tier."""
    chance = random.Random(seed)
    play = Play(blocks=24, budget=32, host_blocks=16, max_num_seqs=3)
    known: set[int] = set()
    seen: set[int] = set()
    evicted: set[int] = set()
    keys: dict[int, bytes] = {}
    for number in range(40):
        prompt = [chance.randrange(1, 4)] * (4 * chance.randrange(1, 6)) + [40]
        play.add(f"{number}", prompt, max_tokens=chance.randrange(1, 6))
        named = tuple((index, prompt[0] * 100 + index) for index in range(len(prompt) // 4))
        keys |= {text_block: key for (_, text_block), key in zip(named, keys_of(prompt), strict=True)}
        if chance.random() < 0.7:
            play.add(f"{number} named", prompt, max_tokens=2, text_blocks=named)
        for _ in range(chance.randrange(6)):
            play.step()
        if chance.random() < 0.05:
            play.scheduler.forget_prefixes()
        if (changes := play.scheduler.take_text_blocks()) is not None:
            assert not known & set(changes.stored)
            assert set(changes.removed) <= known
            known = (known | set(changes.stored)) - set(changes.removed)
            seen |= set(changes.stored)
            evicted |= set(changes.removed)
        assert all(play.pool.holds(keys[one]) or keys[one] in play.tier for one in known)
    play.run()
    assert seen
    assert evicted
