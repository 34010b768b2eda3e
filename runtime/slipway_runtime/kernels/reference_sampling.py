"""Sampling, penalties and bitmasks in plain torch: the reference, and the fallback on a CPU.

A sample is argmax(logits / temperature + Gumbel noise) over the tokens that min-p, top-k and top-p keep. The noise is
a hash of (seed, position, token): no generator, no state. A request samples the same tokens alone, in any batch, after
a preemption and on another replica, as long as its logits are the same.
"""

import numpy as np
import torch
from torch import Tensor

CANDIDATES = 256  # how many top tokens are sorted first when min-p, top-k or top-p truncate
GREEDY_BELOW = 1e-5  # temperatures below are greedy: the likeliest token is taken
IN_PROMPT = 1 << 30  # bit of a count: the prompt has the token. The lower bits count it in the output
PENALIZED_AT_ONCE = 1 << 23  # logits per call: temporary tensors of penalties stay at about 32 MB each
_MASK = 0xFFFFFFFF


def penalize(
    logits: Tensor, prompt: Tensor, output: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Repetition penalty over prompt and output (HF's rule), presence and frequency over the output (OpenAI's)."""
    seen = (prompt + output) > 0
    factor = repetition[:, None]
    logits = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
    return logits - presence[:, None] * (output > 0) - frequency[:, None] * output


def penalize_rows(
    logits: Tensor,
    places: Tensor,
    counts: Tensor,
    rows: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """`penalize` in place, at `places`, (M,), by the counts in `rows`, (M,). logits: (D, V)  counts: (…, V) int32.

    A count is how often the output has a token, plus IN_PROMPT where the prompt has it.
    """
    factors = repetition, presence, frequency
    at_once = max(PENALIZED_AT_ONCE // logits.shape[1], 1)
    for begin in range(0, len(places), at_once):
        part = slice(begin, begin + at_once)
        where, counted = places[part], counts.index_select(0, rows[part])
        logits[where] = penalize(
            logits[where], (counted >= IN_PROMPT).int(), counted % IN_PROMPT, *(factor[part] for factor in factors)
        )


def apply_bitmask(logits: Tensor, places: Tensor, words: Tensor) -> None:
    """Set tokens that the bitmask forbids to -inf, in place. logits: (D, V)  places: (M,) rows  words: (M, W) int32.

    Bit t % 32 of word t // 32 allows token t; tokens beyond the last word are forbidden.
    """
    vocabulary = logits.shape[1]
    packed = words.numpy(force=True).view(np.uint8)
    bits = np.unpackbits(packed, axis=1, count=min(vocabulary, 8 * packed.shape[1]), bitorder="little")
    bits = np.pad(bits, ((0, 0), (0, vocabulary - bits.shape[1])))
    forbidden = torch.from_numpy(bits == 0).to(logits.device)
    logits[places] = logits[places].masked_fill_(forbidden, float("-inf"))


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """Sample one token per row. logits: (R, V) float32; other arguments (R,); seeds and positions int64."""
    random = temperature >= GREEDY_BELOW
    truncated = random & ((top_p < 1.0) | (top_k > 0) | (min_p > 0.0))
    if bool(truncated.all()):  # the common batch: all rows truncate
        scaled = logits / temperature[:, None]
        return _sample_truncated(scaled, top_k, top_p, min_p, seeds, positions, CANDIDATES)
    tokens = logits.argmax(dim=-1)
    if len(rows := (random & ~truncated).nonzero().squeeze(-1)):
        scaled = logits[rows] / temperature[rows, None]
        everything = torch.arange(logits.shape[1], device=logits.device)
        tokens[rows] = (scaled + gumbel(seeds[rows], positions[rows], everything[None, :])).argmax(dim=-1)
    if len(rows := truncated.nonzero().squeeze(-1)):
        scaled = logits[rows] / temperature[rows, None]
        tokens[rows] = _sample_truncated(
            scaled, top_k[rows], top_p[rows], min_p[rows], seeds[rows], positions[rows], CANDIDATES
        )
    return tokens


def _sample_truncated(
    scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, positions: Tensor, candidates: int
) -> Tensor:
    """Sort only the top CANDIDATES tokens; the whole vocabulary for rows that may keep more tokens."""
    values, ids, complete = _keep(scaled, top_k, top_p, min_p, candidates)
    best = (values + gumbel(seeds, positions, ids)).argmax(dim=-1, keepdim=True)
    tokens = ids.gather(1, best).squeeze(1)
    rest = (~complete).nonzero().squeeze(-1)
    if len(rest):
        values, ids, _ = _keep(scaled[rest], top_k[rest], top_p[rest], min_p[rest], scaled.shape[1])
        best = (values + gumbel(seeds[rest], positions[rest], ids)).argmax(dim=-1, keepdim=True)
        tokens[rest] = ids.gather(1, best).squeeze(1)
    return tokens


def _keep(
    scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, candidates: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of the top tokens (-inf: not kept), their ids, and whether they include all kept tokens.

    In order: min-p relative to the likeliest; top-k of those; of these, renormalized, the fewest that reach top-p.
    """
    vocabulary = scaled.shape[1]
    count = min(candidates, vocabulary)
    values, ids = scaled.topk(count, dim=-1)
    floor = values[:, :1] + torch.log(min_p.clamp(min=0.0))[:, None]  # log(0) = -inf: keeps all
    k = torch.where(top_k <= 0, vocabulary, top_k)[:, None]
    kept = (values >= floor) & (torch.arange(count, device=scaled.device)[None, :] < k)
    ends_here = (k.squeeze(1) <= count) | (values[:, -1] < floor.squeeze(1)) | (count == vocabulary)
    total = values.masked_fill(~kept, float("-inf")).logsumexp(dim=-1)
    if not bool(ends_here.all()):  # top-p is a share of all tokens that min-p keeps, sorted here or not
        beyond = scaled.masked_fill(scaled < floor, float("-inf")).logsumexp(dim=-1)
        total = torch.where(ends_here, total, beyond)
    probabilities = (values - total[:, None]).exp().masked_fill(~kept, 0.0)
    mass = probabilities.cumsum(dim=-1)
    kept &= (mass - probabilities < top_p[:, None]) | (top_p >= 1.0)[:, None]
    kept[:, 0] = True  # the likeliest token is kept despite rounding
    return values.masked_fill(~kept, float("-inf")), ids, ends_here | (mass[:, -1] >= top_p)


def gumbel(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """-log(-log(u)), u uniform in (0, 1), hashed from seed, position and token. seeds, positions: (R,)  ids: (R, N)."""
    x = hashed(seeds, positions, token_ids)
    uniform = ((x >> 9).to(torch.float32) + 0.5) * 2.0**-23  # 23 bits: neither 0 nor 1 can come out
    return -torch.log(-torch.log(uniform))


def hashed(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Hash of 32 bits for each token, the same in every implementation. (R, N), int64.

    64 bits of key from seed and position, then murmur3's finalizer over the token, with half of the key mixed in before
    and half in the middle. Products wrap around, as they do in 64-bit integers.
    """
    key = seeds * 0x5851F42D4C957F2D + positions * 0x14057B7EF767814F
    key = (key ^ (key >> 32)) * 0x2545F4914F6CDD1D
    key = (key ^ (key >> 29))[:, None]
    x = (token_ids * 0x9E3779B1 ^ key) & _MASK
    x = ((x ^ (x >> 16)) * 0x85EBCA6B ^ (key >> 32)) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)
