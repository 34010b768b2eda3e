"""Sampling (min-p, top-k, top-p, Gumbel noise) and bitmasks on a GPU, in Triton. Tested against `reference_sampling`.

Kernels, none of which waits for the host:
- candidates: the top CANDIDATES tokens of each tile of a row, and the tile's maximum, mass and count. One read of the
  row, by many programs.
- threshold of candidates: the least score that is kept, searched in registers among the candidates of a row. The bits
  of a float, mapped to an integer, are in the order of the floats, and a binary search over them ends at the k-th
  largest, or where the mass above reaches top-p. Above the greatest of the tiles' last candidates the candidates are
  complete; a row whose threshold may lie below is left to the next kernel.
- threshold of rows: the same search over the whole row, which each step of the search reads once.
- best of tiles: the best of BLOCK tokens, by score plus noise, or by score alone in a greedy row.
- best of rows: the best of the tiles.

A row's result depends on its own scores alone. The integers of the noise equal those of the reference, bit by bit;
logarithms may differ in the last bit. Of tokens with equal scores at the threshold all are kept, where the reference
keeps some. Nothing was timed on a GPU yet: docs/gpu-ledger.md has estimates.
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

__all__ = ["apply_bitmask", "find_thresholds", "sample"]

BLOCK = 2048  # tokens of a program
ROW_BLOCK = 4096  # tokens that the search over a whole row reads at once
CANDIDATES = 64  # of a tile
RUN = tl.constexpr(32)  # adjacent tokens in a tile: 128 bytes. Likely tokens often have adjacent ids
LOWEST_KEY = tl.constexpr(-2139095041)  # of -inf
GREEDY = tl.constexpr(GREEDY_BELOW)


def readable_columns(logits: Tensor) -> int:
    """The vocabulary, or a multiple of 16 above it where each row goes on that far: then loads have 128 bits.

    Some vocabularies are odd (Qwen3 has 151,669 tokens), and their head is padded. logits: (R, V)
    """
    rows, vocabulary = logits.shape
    padded = triton.cdiv(vocabulary, 16) * 16
    behind = logits.untyped_storage().nbytes() // logits.itemsize - logits.storage_offset()
    goes_on = padded <= logits.stride(0) and (rows - 1) * logits.stride(0) + padded <= behind
    return padded if goes_on else vocabulary


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """Sample one token per row. logits: (R, V) float32; the rest (R,); seeds and positions int64 -> (R,) int64."""
    num_rows, vocabulary = logits.shape
    assert logits.stride(1) == 1, "the scores of a row lie side by side"
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    tiles = triton.cdiv(vocabulary, block)
    thresholds, _ = find_thresholds(logits, temperature, top_k, top_p, min_p)
    best = logits.new_empty(num_rows, tiles)
    where = torch.empty(num_rows, tiles, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    _best_of_tiles[(num_rows, tiles)](
        logits, temperature, seeds, positions, thresholds, best, where, logits.stride(0),
        V=vocabulary, READ=readable_columns(logits), BLOCK=block, num_warps=8,
    )  # fmt: skip
    _best_of_rows[(num_rows,)](best, where, tokens, TILES=tiles, BLOCK=triton.next_power_of_2(tiles))
    return tokens


def find_thresholds(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """The least score that min-p, top-k and top-p keep, in this order; -inf: all are kept. (R,)

    Also returns whether it was found among the candidates: 1, or 0 if the whole row had to be searched.
    """
    num_rows, vocabulary = logits.shape
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    tiles, kept = triton.cdiv(vocabulary, block), min(CANDIDATES, block)
    candidates = torch.empty(num_rows, tiles, kept, dtype=torch.int32, device=logits.device)
    stats = logits.new_empty(num_rows, 2, tiles)
    counts = torch.empty(num_rows, tiles, dtype=torch.int32, device=logits.device)
    thresholds = logits.new_empty(num_rows)
    found = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    filters, readable = (temperature, top_k, top_p, min_p), readable_columns(logits)
    _find_candidates[(num_rows, tiles)](
        logits, *filters, candidates, stats, counts, logits.stride(0), V=vocabulary, READ=readable, BLOCK=block,
        KEPT=kept,
    )  # fmt: skip
    _threshold_of_candidates[(num_rows,)](
        candidates, stats, counts, *filters, thresholds, found,
        TILES=tiles, KEPT=kept, BLOCK_T=triton.next_power_of_2(tiles),
        BLOCK=triton.next_power_of_2(tiles) * kept, num_warps=8,
    )  # fmt: skip
    _threshold_of_rows[(num_rows,)](
        logits, *filters, thresholds, found, logits.stride(0),
        V=vocabulary, READ=readable, BLOCK=min(ROW_BLOCK, triton.next_power_of_2(vocabulary)), num_warps=8,
    )  # fmt: skip
    return thresholds, found


def apply_bitmask(logits: Tensor, places: Tensor, words: Tensor) -> None:
    """Set tokens that the bitmask forbids to -inf, in place. logits: (D, V)  places: (M,) rows  words: (M, W) int32."""
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
    # Tokens beyond the last word are forbidden.
    word = tl.load(words + mask * num_words + token // 32, mask=token // 32 < num_words, other=0)
    barred = ((word >> (token % 32)) & 1) == 0
    row = logits + tl.load(places + mask).to(tl.int64) * stride
    tl.store(row + token, tl.full([BLOCK], float("-inf"), tl.float32), mask=barred & (token < V))


@triton.jit
def _key(x):
    """Map floats to integers in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _unkey(key):
    """The float of a key, the inverse of `_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _scores(row, token, temperature, V: tl.constexpr, READ: tl.constexpr):
    return tl.div_rn(_logits(row, token, V, READ), temperature)


@triton.jit
def _logits(row, token, V: tl.constexpr, READ: tl.constexpr):
    """-inf beyond the vocabulary, also where there are columns to READ."""
    x = tl.load(row + token, mask=token < READ, other=float("-inf"))
    return tl.where(token < V, x, float("-inf")) if READ > V else x


@triton.jit
def _filters(index, temperatures, top_ks, top_ps, min_ps):
    """A row's temperature, top-k, top-p, min-p, and whether any token may be dropped."""
    temperature = tl.load(temperatures + index)
    k = tl.load(top_ks + index).to(tl.int32)
    p = tl.load(top_ps + index)
    min_p = tl.load(min_ps + index)
    return temperature, k, p, min_p, (temperature >= GREEDY) & ((p < 1.0) | (k > 0) | (min_p > 0.0))


@triton.jit
def _find_candidates(
    logits, temperatures, top_ks, top_ps, min_ps, candidates, stats, counts, stride,
    V: tl.constexpr, READ: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Keys of a tile's top KEPT tokens, the likeliest first; its maximum, mass and count. Grid: (R, tiles)."""
    index = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    tiles = tl.num_programs(1)
    temperature, _, _, _, truncated = _filters(index, temperatures, top_ks, top_ps, min_ps)
    if not truncated:
        return
    # Tiles interleave runs of RUN tokens, so that the likely tokens of a row are spread over all tiles.
    n = tl.arange(0, BLOCK)
    x = _scores(logits + index * stride, ((n // RUN) * tiles + tile) * RUN + n % RUN, temperature, V, READ)
    maximum = tl.max(x, 0)
    real = x > float("-inf")
    mass = tl.sum(tl.where(real, tl.exp(x - maximum), 0.0), 0)
    place = index * tiles + tile
    tl.store(stats + index * 2 * tiles + tile, maximum)
    tl.store(stats + index * 2 * tiles + tiles + tile, mass)
    tl.store(counts + place, tl.sum(real.to(tl.int32), 0))
    tl.store(candidates + place * KEPT + tl.arange(0, KEPT), tl.topk(_key(x), KEPT))


@triton.jit
def _threshold_of_candidates(
    candidates, stats, counts, temperatures, top_ks, top_ps, min_ps, thresholds, found,
    TILES: tl.constexpr, KEPT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (R,)."""
    index = tl.program_id(0).to(tl.int64)
    _, k, p, min_p, truncated = _filters(index, temperatures, top_ks, top_ps, min_ps)
    threshold = float("-inf")
    resolved = True
    if truncated:
        tile, n = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK)
        maxima = tl.load(stats + index * 2 * TILES + tile, mask=tile < TILES, other=float("-inf"))
        masses = tl.load(stats + index * 2 * TILES + TILES + tile, mask=tile < TILES, other=0.0)
        kept = tl.sum(tl.load(counts + index * TILES + tile, mask=tile < TILES, other=0), 0)
        maximum = tl.max(maxima, 0)
        mass = tl.sum(tl.where(masses > 0.0, masses * tl.exp(maxima - maximum), 0.0), 0)
        row = candidates + index * (TILES * KEPT)
        x = _unkey(tl.load(row + n, mask=n < TILES * KEPT, other=LOWEST_KEY))
        lasts = tl.load(row + tile * KEPT + KEPT - 1, mask=tile < TILES, other=LOWEST_KEY)
        cut = tl.maximum(tl.max(lasts, 0), LOWEST_KEY)  # candidates above it are complete
        low = tl.zeros_like(cut) + LOWEST_KEY
        if min_p > 0.0:
            low = tl.minimum(_key(maximum + tl.log(min_p)), _key(maximum)) - 1
            if low >= cut:
                kept, mass = _above(x, row, 1.0, low, maximum, True, TILES, TILES, BLOCK)
            else:  # the count that min-p keeps is unknown; not needed if top-k keeps no more than the candidates
                count, _ = _above(x, row, 1.0, cut, maximum, True, TILES, TILES, BLOCK)
                resolved = (k > 0) & (count >= k)
                kept = count + 1
        low, complete = _last_not_kept(x, row, 1.0, maximum, k, p, low, kept, mass, cut, True, TILES, TILES, BLOCK)
        resolved = resolved & complete
        if low > LOWEST_KEY:
            threshold = tl.min(tl.where(_key(x) > low, x, float("inf")), 0)
    tl.store(thresholds + index, threshold)
    tl.store(found + index, tl.where(resolved, 1, 0))


@triton.jit
def _threshold_of_rows(
    logits, temperatures, top_ks, top_ps, min_ps, thresholds, found, stride,
    V: tl.constexpr, READ: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For rows whose threshold was not found among the candidates. Grid: (R,)."""
    index = tl.program_id(0).to(tl.int64)
    if tl.load(found + index) != 0:
        return
    temperature, k, p, min_p, _ = _filters(index, temperatures, top_ks, top_ps, min_ps)
    row = logits + index * stride
    x = tl.zeros([BLOCK], dtype=tl.float32)  # not read
    maximum = float("-inf")
    for start in range(0, V, BLOCK):
        maximum = tl.maximum(maximum, tl.max(_scores(row, start + tl.arange(0, BLOCK), temperature, V, READ), 0))
    low = tl.zeros_like(_key(maximum)) + LOWEST_KEY  # the last key that is not kept
    if min_p > 0.0:
        low = tl.minimum(_key(maximum + tl.log(min_p)), _key(maximum)) - 1
    kept, mass = _above(x, row, temperature, low, maximum, False, V, READ, BLOCK)
    low, _ = _last_not_kept(x, row, temperature, maximum, k, p, low, kept, mass, low, False, V, READ, BLOCK)
    least = float("inf")  # the least score with a greater key, the score of some token
    for start in range(0, V, BLOCK):
        scores = _scores(row, start + tl.arange(0, BLOCK), temperature, V, READ)
        least = tl.minimum(least, tl.min(tl.where(_key(scores) > low, scores, float("inf")), 0))
    tl.store(thresholds + index, least)


@triton.jit
def _last_not_kept(
    x, row, temperature, maximum, k, p, low, kept, mass, cut,
    IN_REGISTERS: tl.constexpr, V: tl.constexpr, READ: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The greatest key that top-k and top-p drop, and whether all tokens that they keep are above `cut`.

    Tokens up to the key `low` are already dropped; `kept` tokens are left, with total mass `mass`. x: a row's scores in
    registers, where scores up to `cut` may be missing; without IN_REGISTERS the row is read.
    """
    top = _key(maximum)
    complete = True
    count_above, mass_above = kept, mass
    if IN_REGISTERS:
        count_above, mass_above = _above(x, row, temperature, tl.maximum(cut, low), maximum, True, V, READ, BLOCK)
    if (k > 0) & (k < kept):
        complete = count_above >= k
        low = tl.maximum(low, cut)
        kept, mass = count_above, mass_above
        # Above `low` are k or more, above `high` are fewer.
        high = top
        fewer = 0
        while (high.to(tl.int64) - low > 1) & (kept - fewer > 1) & (kept > k):
            middle = ((low.to(tl.int64) + high) >> 1).to(tl.int32)
            count, over = _above(x, row, temperature, middle, maximum, IN_REGISTERS, V, READ, BLOCK)
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
        if cut > low:
            complete = complete & (mass_above >= goal)
            low = cut
            kept = count_above
        high = top
        fewer = 0
        while (high.to(tl.int64) - low > 1) & (kept - fewer > 1):
            middle = ((low.to(tl.int64) + high) >> 1).to(tl.int32)
            count, over = _above(x, row, temperature, middle, maximum, IN_REGISTERS, V, READ, BLOCK)
            less = over < goal
            high = tl.where(less, middle, high)
            fewer = tl.where(less, count, fewer)
            low = tl.where(less, low, middle)
            kept = tl.where(less, kept, count)
    return low, complete


@triton.jit
def _above(
    x, row, temperature, key, maximum,
    IN_REGISTERS: tl.constexpr, V: tl.constexpr, READ: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Number of tokens with a greater key, and their mass relative to the likeliest token's."""
    count = 0
    mass = 0.0
    if IN_REGISTERS:
        over = _key(x) > key
        count += tl.sum(over.to(tl.int32), 0)
        mass += tl.sum(tl.where(over, tl.exp(x - maximum), 0.0), 0)
    else:
        for start in range(0, V, BLOCK):
            scores = _scores(row, start + tl.arange(0, BLOCK), temperature, V, READ)
            over = _key(scores) > key
            count += tl.sum(over.to(tl.int32), 0)
            mass += tl.sum(tl.where(over, tl.exp(scores - maximum), 0.0), 0)
    return count, mass


@triton.jit
def _best_of_tiles(
    logits, temperatures, seeds, positions, thresholds, best, where, stride,
    V: tl.constexpr, READ: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (R, blocks of the vocabulary)."""
    index = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    temperature = tl.load(temperatures + index)
    row = logits + index * stride
    if temperature < GREEDY:
        x = _logits(row, token, V, READ)
    else:
        x = _scores(row, token, temperature, V, READ)
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
    """Noise as in the reference: a key of 64 bits, its lower half mixed in before, its upper half in the middle."""
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
