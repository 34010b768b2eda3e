"""Properties of prefix matching: chains, salts, and an index that forgets the end of a text first."""

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from slipway_gateway.picker.prefix import BLOCK_BYTES, MAX_BLOCKS, PrefixIndex, block_hashes

texts = st.binary(max_size=4 * BLOCK_BYTES)


def chain(text: bytes, *salt: str) -> tuple[int, ...]:
    return block_hashes([text], *salt)


@given(texts, texts, texts)
def test_two_texts_share_exactly_the_hashes_of_their_common_blocks(common, one, other):
    first, second = common + one, common + other
    shared = 0
    while shared * BLOCK_BYTES + BLOCK_BYTES <= min(len(first), len(second)) and (
        first[: (shared + 1) * BLOCK_BYTES] == second[: (shared + 1) * BLOCK_BYTES]
    ):
        shared += 1

    a, b = chain(first), chain(second)

    assert len(a) == len(first) // BLOCK_BYTES
    assert a[:shared] == b[:shared]
    assert not set(a[shared:]) & set(b[shared:])


@given(st.binary(min_size=BLOCK_BYTES, max_size=1000), st.text(max_size=5), st.text(max_size=5))
def test_tenants_and_models_never_share_a_hash(text, one, other):
    assert (set(chain(text, one, "m")) & set(chain(text, other, "m")) != set()) == (one == other)
    assert not set(chain(text, one, "m1")) & set(chain(text, one, "m2"))


def test_a_huge_prompt_costs_no_more_than_the_limit():
    assert len(block_hashes([b"x" * (64 << 20)])) == MAX_BLOCKS
    assert block_hashes([b"x" * (64 << 20), b"y"]) == block_hashes([b"x" * BLOCK_BYTES * MAX_BLOCKS])


def test_every_process_computes_the_same_hashes():
    program = "from slipway_gateway.picker.prefix import block_hashes; print(block_hashes([b'abcd' * 256], 't', 'm'))"
    said = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True
        ).stdout
        for seed in ("1", "2")
    }

    assert said == {f"{block_hashes([b'abcd' * 256], 't', 'm')}\n"}


trees = st.lists(st.lists(st.sampled_from(b"ab"), min_size=1, max_size=8).map(bytes), max_size=30)


@given(trees, st.integers(1, 12))
def test_the_index_keeps_prefixes_within_its_bound_and_finds_their_length(sequences, limit):
    """Each letter stands for a block; the known part of every chain is a prefix of it, which the search relies on."""
    index = PrefixIndex(blocks_per_endpoint=limit)
    for number, sequence in enumerate(sequences):
        blocks = [hash(sequence[: length + 1]) for length in range(len(sequence))]
        index.add("p", blocks)

        assert index.blocks_of("p") <= limit
        assert index.matched("p", blocks) == min(len(blocks), limit)
        for earlier in sequences[:number]:
            chain_ = [hash(earlier[: length + 1]) for length in range(len(earlier))]
            known = [index.matched("p", chain_[: length + 1]) == length + 1 for length in range(len(chain_))]
            assert known == sorted(known, reverse=True)
            assert index.matched("p", chain_) == sum(known)


def test_many_endpoints_share_the_bound_in_all():
    index = PrefixIndex(blocks_per_endpoint=100, blocks_in_all=400)
    for number in range(40):
        index.add(f"p{number}", range(number * 1000, number * 1000 + 100))
    for number in range(40):
        index.add(f"p{number}", [number])

    assert sum(index.blocks_of(f"p{number}") for number in range(40)) <= 400


def test_an_endpoint_that_left_is_forgotten():
    index = PrefixIndex()
    index.add("p", [1, 2])
    index.remove("p")

    assert index.matched("p", [1, 2]) == 0
