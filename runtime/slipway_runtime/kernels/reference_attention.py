"""Paged attention in plain torch: the reference, and the fallback on a CPU.

On a CPU it is bound by memory and by the overhead of calls. Hence:
- rows of one new token (decode) are computed together, in groups whose lengths differ by less than a factor of two:
  one gather and one call per group, the query heads of a KV head folded into rows of one small matrix;
- a gather reads whole pages of a head (`kv_pages`) into a buffer that all layers of a step share: fresh memory costs
  a page fault per 4 KiB, which is more than reading it;
- a prompt without computed tokens needs no gather: its keys and values are inputs of the call;
- a chunk with computed tokens is processed in tiles of rows, so that the mask never exceeds TILE × context.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from slipway_runtime.kernels import kv_pages
from slipway_runtime.kernels.reference_norms import rms_norm
from slipway_runtime.kernels.upload import Ints

HeadNorms = tuple[Tensor, Tensor, float] | None  # weights (D,) of queries and of keys, and eps
TILE = 128  # rows of a chunk that share a mask


@dataclass(frozen=True, slots=True)
class Scoring:
    """Changes to attention scores before the softmax: soft cap and sinks."""

    softcap: float | None = None  # cap · tanh(score / cap), before the mask
    sinks: Tensor | None = None  # (Hq,) float32: a score per head that takes part in the softmax, without a value


def rope_and_store(
    qkv: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor, num_q_heads: int, norms: HeadNorms = None
) -> Tensor:
    """Norm and rotate queries and keys in place, write keys and values into their slots, return the queries.

    cos, sin: (T, 1, D); the first half of `sin` is negated, so that turning the halves around is a plain roll.
    A quantized cache gets quantized keys and values; those in `qkv` are not changed by it.
    """
    num_tokens, num_heads, head_dim = qkv.shape
    num_kv_heads = (num_heads - num_q_heads) // 2
    qk = qkv[:, : num_q_heads + num_kv_heads]
    if norms is not None:
        of_queries, of_keys, eps = norms
        qk[:, :num_q_heads] = rms_norm(qk[:, :num_q_heads], of_queries, eps)
        qk[:, num_q_heads:] = rms_norm(qk[:, num_q_heads:], of_keys, eps)
    torch.addcmul(qk * cos, qk.roll(head_dim // 2, dims=-1), sin, out=qk)
    kv_pages.store(qkv[:, num_q_heads:].view(num_tokens, 2, num_kv_heads, head_dim), cache, slots)
    return qkv[:, :num_q_heads]


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """B rows of one new token and of similar length."""

    tokens: Tensor | None  # indices of their tokens in the step; None: all tokens, in order
    blocks: Tensor  # (B, n) block tables, padded with the null block
    lengths: Ints  # (B,) tokens, the new one included

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return int(self.lengths.max())


@dataclass(frozen=True, slots=True)
class Chunk:
    """Several new tokens of one sequence."""

    start: int  # its tokens in the step: start … end
    end: int
    past: int
    blocks: Tensor  # (1, n) its block table

    @property
    def length(self) -> int:
        """Past and new tokens."""
        return self.past + self.end - self.start


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Attention plan of one step, shared by all layers. `memo` keeps results of the first layer for the next ones."""

    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]
    block_size: int
    like: Tensor
    memo: dict[tuple[object, ...], Tensor | tuple[Tensor, ...] | None] = field(default_factory=dict)


def plan_attention(
    num_computed: Ints, num_new: Ints, block_tables: Ints, block_size: int, like: Tensor
) -> AttentionPlan:
    """Make the attention plan of a step, shared by all layers. Rows of one new token first. `like`: dtype, device."""
    ends = np.cumsum(num_new)
    num_decodes = int(np.count_nonzero(num_new == 1))
    lengths = num_computed + num_new

    def tables(rows: Ints, longest: int) -> Tensor:
        return torch.from_numpy(block_tables[rows, : -(-longest // block_size)].astype(np.int64)).to(like.device)

    chunks = [
        Chunk(int(ends[row] - num_new[row]), int(ends[row]), int(num_computed[row]),
              tables(np.array([row]), int(lengths[row])))
        for row in range(num_decodes, len(num_new))
    ]  # fmt: skip
    groups: list[DecodeGroup] = []
    if num_decodes:
        blocks = -(-lengths[:num_decodes] // block_size)
        if int(blocks.max()) <= 2 * int(blocks.min()):
            sizes = np.zeros(num_decodes, dtype=np.int64)  # one group, the common case
        else:
            sizes = np.ceil(np.log2(blocks)).astype(np.int64)  # a group: block counts within the same power of two
        for size in np.unique(sizes) if sizes.any() else (0,):
            members = np.flatnonzero(sizes == size)
            everything = len(members) == num_decodes and not chunks
            tokens = None if everything else torch.from_numpy(members).to(like.device)
            own = lengths[members]
            groups.append(DecodeGroup(tokens, tables(members, int(own.max())), own))
    return AttentionPlan(tuple(groups), tuple(chunks), block_size, like)


def paged_attention(
    q: Tensor,
    kv: Tensor,
    cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    window: int | None = None,
    scoring: Scoring | None = None,
) -> Tensor:
    """softmax(q·k * scale) · v over the tokens of the same sequence up to the query's own, the last `window` of them.

    q: (T, Hq, D)  kv: (T, planes, Hkv, D), this step's, in the cache already -> (T, Hq * D). A cache of one plane has
    keys that are the values, too (MLA).
    """
    num_tokens, num_heads, head_dim = q.shape
    if len(plan.groups) == 1 and plan.groups[0].tokens is None:
        return _decode(q, cache, plan, 0, scale, window, scoring).reshape(num_tokens, num_heads * head_dim)
    out = q.new_empty(num_tokens, num_heads, head_dim)
    for index, group in enumerate(plan.groups):
        assert group.tokens is not None
        members = q.index_select(0, group.tokens)
        attended = _decode(members, cache, plan, index, scale, window, scoring)
        out.index_copy_(0, group.tokens, attended.reshape(len(members), num_heads, head_dim))
    for index in range(len(plan.chunks)):
        _extend(q, kv, cache, plan, index, scale, window, scoring, out)
    return out.view(num_tokens, num_heads * head_dim)


def _decode(
    q: Tensor, cache: Tensor, plan: AttentionPlan, index: int, scale: float, window: int | None, scoring: Scoring | None
) -> Tensor:
    """q: (B, Hq, D) -> (B, Hkv, G, D)."""
    group, num_kv_heads = plan.groups[index], cache.shape[2]
    key = ("decode mask", index, window)
    if key not in plan.memo:
        plan.memo[key] = decode_mask(group.lengths, window, plan.like)
    mask = plan.memo[key]
    assert not isinstance(mask, tuple)
    seen = gather(cache, group.blocks, q, plan, ("decode", index))[:, :, :, : group.longest]
    k, v = seen[0], seen[-1]  # of one plane: the keys are the values
    folded = q.reshape(q.shape[0], num_kv_heads, -1, q.shape[2])  # (B, Hkv, G, D): reads each key once for G heads
    if scoring is not None:
        sinks = None if scoring.sinks is None else scoring.sinks.view(num_kv_heads, -1, 1)
        return attend(folded, k, v, mask, scale, scoring.softcap, sinks)
    return F.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scale)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention step by step, in float32. q: (…, n, D)  k, v: (…, m, D)  mask: 0 or -inf  sinks: (…, n or 1, 1)."""
    scores = (q.float() @ k.float().transpose(-1, -2)).mul_(scale)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores += mask.float()
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        column = sinks.float().expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
    return (weights @ v.float()).to(q.dtype)


def _extend(
    q: Tensor,
    kv: Tensor,
    cache: Tensor,
    plan: AttentionPlan,
    index: int,
    scale: float,
    window: int | None,
    scoring: Scoring | None,
    out: Tensor,
) -> None:
    chunk, num_kv_heads = plan.chunks[index], cache.shape[2]
    rows = slice(chunk.start, chunk.end)
    count = chunk.end - chunk.start
    queries = q[rows].reshape(count, num_kv_heads, -1, q.shape[2]).permute(1, 2, 0, 3)  # (Hkv, G, n, D)
    into = out[rows].view(count, num_kv_heads, -1, q.shape[2]).permute(1, 2, 0, 3)
    if chunk.past == 0 and cache.dtype == kv.dtype:
        seen = kv[rows].permute(1, 2, 0, 3)
    else:  # read rounded keys and values from the cache, as later steps will read them
        seen = gather(cache, chunk.blocks, q, plan, ("extend", index))[:, 0, :, : chunk.length]
    # The query heads of a KV head read the same keys: a stride of zero instead of a copy.
    shared = seen.unsqueeze(2).expand(-1, num_kv_heads, queries.shape[1], -1, q.shape[2])
    k, v = shared[0], shared[-1]
    if scoring is None and chunk.past == 0 and (window is None or window >= chunk.length):
        into.copy_(F.scaled_dot_product_attention(queries, k, v, is_causal=True, scale=scale))
        return
    key = ("chunk masks", index, window)
    if key not in plan.memo:
        plan.memo[key] = chunk_masks(chunk.past, count, window, plan.like)
    masks = plan.memo[key]
    assert isinstance(masks, tuple)
    for number, mask in enumerate(masks):
        tile = slice(number * TILE, number * TILE + mask.shape[0])
        end = mask.shape[1]
        if scoring is not None:
            sinks = None if scoring.sinks is None else scoring.sinks.view(num_kv_heads, -1, 1, 1)
            seen_k, seen_v = k[:, :, :end], v[:, :, :end]
            into[:, :, tile] = attend(queries[:, :, tile], seen_k, seen_v, mask, scale, scoring.softcap, sinks)
            continue
        into[:, :, tile] = F.scaled_dot_product_attention(
            queries[:, :, tile], k[:, :, :end], v[:, :, :end], attn_mask=mask, scale=scale
        )


def gather(cache: Tensor, blocks: Tensor, like: Tensor, plan: AttentionPlan, key: tuple[object, ...]) -> Tensor:
    """Keys and values of block tables. blocks: (B, n) -> (planes, B, Hkv, n * page, D) in the type of `like`.

    The result is overwritten by the next gather of the same plan.
    """
    planes, num_kv_heads, head_dim = *cache.shape[1:3], like.shape[-1]
    pages = cache.view(-1, cache[0, 0, 0].numel())  # (blocks * planes * Hkv, a page of a head)
    if key not in plan.memo:
        of_block = torch.arange(planes * num_kv_heads, device=blocks.device).view(planes, 1, num_kv_heads, 1)
        plan.memo[key] = (blocks[None, :, None, :] * (planes * num_kv_heads) + of_block).flatten()
    wanted = plan.memo[key]
    assert isinstance(wanted, Tensor)
    shape = (planes, blocks.shape[0], num_kv_heads, blocks.shape[1])
    if kv_pages.is_quantized(cache.dtype):
        read = pages.view(torch.int8).index_select(0, wanted).view(cache.dtype).view(*shape, -1)
        return kv_pages.dequantized(read, head_dim, like.dtype).flatten(3, 4)
    size = len(wanted) * pages.shape[1]
    buffer = plan.memo.get(("buffer",))
    if not isinstance(buffer, Tensor) or buffer.numel() < size:
        buffer = pages.new_empty(size)
        plan.memo["buffer",] = buffer
    read = torch.index_select(pages, 0, wanted, out=buffer[:size].view(len(wanted), -1))
    return read.view(*shape, -1, head_dim).flatten(3, 4).to(like.dtype)


def decode_mask(lengths: Ints, window: int | None, like: Tensor) -> Tensor | None:
    """Mask (B, 1, 1, longest) of 0 or -inf; None: no mask is needed."""
    longest = int(lengths.max())
    if int(lengths.min()) == longest and (window is None or window >= longest):
        return None
    positions = np.arange(longest)
    visible = positions < lengths[:, None]
    if window is not None:
        visible &= positions >= lengths[:, None] - window
    return _additive(torch.from_numpy(visible), like)[:, None, None, :]


def chunk_masks(past: int, count: int, window: int | None, like: Tensor) -> tuple[Tensor, ...]:
    """Causal masks of a chunk's tiles: (TILE, past + rows so far) each, 0 or -inf."""
    masks = []
    for first in range(past, past + count, TILE):
        last = min(first + TILE, past + count)
        keys, queries = torch.arange(last)[None, :], torch.arange(first, last)[:, None]
        visible = keys <= queries
        if window is not None:
            visible &= keys > queries - window
        masks.append(_additive(visible, like))
    return tuple(masks)


def _additive(visible: Tensor, like: Tensor) -> Tensor:
    mask = torch.zeros(visible.shape, dtype=like.dtype)
    return mask.masked_fill_(~visible, float("-inf")).to(like.device)
