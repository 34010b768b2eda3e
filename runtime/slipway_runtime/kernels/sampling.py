"""Drawing tokens on a GPU, in Triton: a claim about `reference_sampling`.

Three kernels, nothing of which waits for the host:
- threshold: one program a row finds the score from which tokens are kept. A truncated row is not sorted: the bits of
  a float, read as an integer, are in the order of the floats, and a search by halves over them ends at the k-th
  largest, or where the mass above reaches top-p. Each step reads the row once, out of the cache; it ends as soon as
  no more than one token is between the bounds. A row that keeps everything is not read.
- tiles: the best of BLOCK tokens, by score plus noise, or by score alone in a greedy row.
- rows: the best of the tiles.

The integers of the noise are those of the reference, bit by bit; logarithms may differ in the last bit. Of tokens with
equal scores at the threshold all are kept, where the reference keeps some. No timing on a GPU has been made yet.
"""

# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
# Triton comes without types, and gives the arguments of a kernel its own.
# ruff: noqa: N803
# Compile-time constants of a kernel are upper case, as everywhere in Triton.

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipway_runtime.kernels.reference_sampling import GREEDY_BELOW

__all__ = ["apply_bitmask", "draw"]

BLOCK = 8192  # tokens of a program
LOWEST_KEY = tl.constexpr(-2139095041)  # of -inf
GREEDY = tl.constexpr(GREEDY_BELOW)


def draw(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """One token a row. logits: (R, V) float32; the rest (R,); seeds and positions int64 -> (R,) int64."""
    num_rows, vocabulary = logits.shape
    assert logits.stride(1) == 1, "the scores of a row lie side by side"
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    tiles = triton.cdiv(vocabulary, block)
    thresholds = logits.new_empty(num_rows)
    best = logits.new_empty(num_rows, tiles)
    where = torch.empty(num_rows, tiles, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    _threshold[(num_rows,)](
        logits, temperature, top_k, top_p, min_p, thresholds, logits.stride(0), V=vocabulary, BLOCK=block, num_warps=16
    )
    _best_of_tiles[(num_rows, tiles)](
        logits,
        temperature,
        seeds,
        positions,
        thresholds,
        best,
        where,
        logits.stride(0),
        V=vocabulary,
        BLOCK=block,
        num_warps=16,
    )
    _best_of_rows[(num_rows,)](best, where, tokens, TILES=tiles, BLOCK=triton.next_power_of_2(tiles))
    return tokens


def apply_bitmask(logits: Tensor, places: Tensor, words: Tensor) -> None:
    """-inf for what the masks do not allow, in place. logits: (D, V)  places: (M,) rows  words: (M, W) int32."""
    if not len(places):
        return
    vocabulary = logits.shape[1]
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    _apply_bitmask[(len(places), triton.cdiv(vocabulary, block))](
        logits, places, words, logits.stride(0), words.shape[1], V=vocabulary, BLOCK=block
    )


@triton.jit(do_not_specialize=["stride", "num_words"])
def _apply_bitmask(logits, places, words, stride, num_words, V: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (M, blocks of the vocabulary)."""
    mask = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # Behind the last word nothing is allowed.
    word = tl.load(words + mask * num_words + token // 32, mask=token // 32 < num_words, other=0)
    barred = ((word >> (token % 32)) & 1) == 0
    row = logits + tl.load(places + mask).to(tl.int64) * stride
    tl.store(row + token, tl.full([BLOCK], float("-inf"), tl.float32), mask=barred & (token < V))


@triton.jit
def _key(x):
    """An integer for a float, in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _scores(row, token, temperature, V: tl.constexpr):
    return tl.div_rn(tl.load(row + token, mask=token < V, other=float("-inf")), temperature)


@triton.jit
def _above(row, temperature, key, maximum, V: tl.constexpr, BLOCK: tl.constexpr):
    """How many tokens have a greater key, and the mass of those, the likeliest's being 1."""
    count = 0
    mass = 0.0
    for start in range(0, V, BLOCK):
        x = _scores(row, start + tl.arange(0, BLOCK), temperature, V)
        over = _key(x) > key
        count += tl.sum(over.to(tl.int32), 0)
        mass += tl.sum(tl.where(over, tl.exp(x - maximum), 0.0), 0)
    return count, mass


@triton.jit
def _threshold(
    logits, temperatures, top_ks, top_ps, min_ps, thresholds, stride, V: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The least score that min-p, top-k and top-p keep, in this order; -inf: all. Grid: (R,)."""
    index = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + index)
    k = tl.load(top_ks + index).to(tl.int32)
    p = tl.load(top_ps + index)
    min_p = tl.load(min_ps + index)
    row = logits + index * stride
    threshold = float("-inf")
    if (temperature >= GREEDY) & ((p < 1.0) | (k > 0) | (min_p > 0.0)):
        maximum = float("-inf")
        for start in range(0, V, BLOCK):
            x = _scores(row, start + tl.arange(0, BLOCK), temperature, V)
            maximum = tl.maximum(maximum, tl.max(x, 0))
        top = _key(maximum)
        low = tl.zeros_like(top) + LOWEST_KEY  # the last key that is not kept
        if min_p > 0.0:
            low = tl.minimum(_key(maximum + tl.log(min_p)), top) - 1
        kept, mass = _above(row, temperature, low, maximum, V, BLOCK)
        if (k > 0) & (k < kept):
            # Above `low` are k or more, above `high` are fewer.
            high = top
            fewer = 0
            while (high.to(tl.int64) - low > 1) & (kept - fewer > 1) & (kept > k):
                middle = ((low.to(tl.int64) + high) >> 1).to(tl.int32)
                count, over = _above(row, temperature, middle, maximum, V, BLOCK)
                enough = count >= k
                low = tl.where(enough, middle, low)
                kept = tl.where(enough, count, kept)
                mass = tl.where(enough, over, mass)
                high = tl.where(enough, high, middle)
                fewer = tl.where(enough, fewer, count)
        if p < 1.0:
            # A token is kept when what is above it is less than p of the whole: at `high` it is; at `low` it is not, or
            # was not kept before.
            goal = p * mass
            high = top
            fewer = 0
            while (high.to(tl.int64) - low > 1) & (kept - fewer > 1):
                middle = ((low.to(tl.int64) + high) >> 1).to(tl.int32)
                count, over = _above(row, temperature, middle, maximum, V, BLOCK)
                less = over < goal
                high = tl.where(less, middle, high)
                fewer = tl.where(less, count, fewer)
                low = tl.where(less, low, middle)
                kept = tl.where(less, kept, count)
        threshold = _least_above(row, temperature, low, V, BLOCK)
    tl.store(thresholds + index, threshold)


@triton.jit
def _least_above(row, temperature, key, V: tl.constexpr, BLOCK: tl.constexpr):
    """The least score with a greater key: a score that a token has."""
    least = float("inf")
    for start in range(0, V, BLOCK):
        x = _scores(row, start + tl.arange(0, BLOCK), temperature, V)
        least = tl.minimum(least, tl.min(tl.where(_key(x) > key, x, float("inf")), 0))
    return least


@triton.jit
def _best_of_tiles(
    logits, temperatures, seeds, positions, thresholds, best, where, stride, V: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid: (R, blocks of the vocabulary)."""
    index = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    temperature = tl.load(temperatures + index)
    row = logits + index * stride
    if temperature < GREEDY:
        x = tl.load(row + token, mask=token < V, other=float("-inf"))
    else:
        x = _scores(row, token, temperature, V)
        noise = _gumbel(tl.load(seeds + index), tl.load(positions + index), token)
        x = tl.where(x >= tl.load(thresholds + index), x + noise, float("-inf"))
    highest = tl.max(x, 0)
    first = tl.min(tl.where((x == highest) & (token < V), token, 0x7FFFFFFF), 0)
    place = index * tl.num_programs(1) + tl.program_id(1)
    tl.store(best + place, highest)
    tl.store(where + place, first)


@triton.jit
def _best_of_rows(best, where, tokens, TILES: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (R,)."""
    index = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, BLOCK)
    x = tl.load(best + index * TILES + tile, mask=tile < TILES, other=float("-inf"))
    token = tl.load(where + index * TILES + tile, mask=tile < TILES, other=0x7FFFFFFF)
    first = tl.min(tl.where(x == tl.max(x, 0), token, 0x7FFFFFFF), 0)
    tl.store(tokens + index, tl.where(first == 0x7FFFFFFF, 0, first).to(tl.int64))  # scores that are no numbers


@triton.jit
def _gumbel(seed, position, token):
    """As in the reference: a key of 64 bits, whose lower half goes in before and the upper in the middle."""
    x = _hash(seed, position, token)
    uniform = ((x >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2^-23
    return -tl.log(-tl.log(uniform))


@triton.jit
def _hash(seed, position, token):
    key = seed * 0x5851F42D4C957F2D + position * 0x14057B7EF767814F
    key = (key ^ (key >> 32)) * 0x2545F4914F6CDD1D
    key = key ^ (key >> 29)
    x = token.to(tl.uint32) * 0x9E3779B1 ^ key.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x85EBCA6B ^ (key >> 32).to(tl.uint32)
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)
