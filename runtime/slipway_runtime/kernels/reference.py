"""Every kernel in plain torch: the definition, and what runs on a CPU.

The cache of one layer is (slots, 2, Hkv, D): slot = block * block_size + offset, keys at [:, 0], values at [:, 1].
Keys and values of a token lie side by side, so that one copy writes them and one gather reads them.

Attention on a CPU is bound by memory and by the overhead of calls. Hence:
- rows of one new token (decode) are computed together, in groups whose lengths differ by less than a factor of two:
  one gather and one call per group, the query heads of a KV head folded into rows of one small matrix;
- a prompt without a past needs no gather: its keys and values are at hand;
- a chunk with a past goes through in tiles of rows, so that the mask never grows beyond TILE × context.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

from slipway_runtime.kernels.reference_lora import add_lora, plan_lora
from slipway_runtime.kernels.reference_sampling import draw, penalize

__all__ = [
    "add_lora",
    "draw",
    "paged_attention",
    "penalize",
    "plan_attention",
    "plan_lora",
    "rms_norm",
    "rope_and_store",
    "swiglu",
]

Ints = npt.NDArray[np.int64]

TILE = 128  # rows of a chunk that share a mask


# --- norms, activation


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight, the mean in float32, the weight applied in x's type."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


# --- positions and cache


def rope_and_store(qkv: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor, num_q_heads: int) -> Tensor:
    """Rotate queries and keys in place, write keys and values into their slots, return the queries.

    cos, sin: (T, 1, D); the first half of `sin` is negated, so that turning the halves around is a plain roll.
    """
    num_tokens, num_heads, head_dim = qkv.shape
    num_kv_heads = (num_heads - num_q_heads) // 2
    qk = qkv[:, : num_q_heads + num_kv_heads]
    torch.addcmul(qk * cos, qk.roll(head_dim // 2, dims=-1), sin, out=qk)
    cache.index_copy_(0, slots, qkv[:, num_q_heads:].view(num_tokens, 2, num_kv_heads, head_dim))
    return qkv[:, :num_q_heads]


# --- attention


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows of one new token and of similar length."""

    tokens: Tensor | None  # their places among the step's tokens; None: all tokens, in order
    blocks: Tensor  # (B * n,) block tables, padded with the null block
    batch: int
    length: int  # the longest, in tokens
    mask: Tensor | None  # (B, 1, 1, length), 0 or -inf; None: all rows are equally long


@dataclass(frozen=True, slots=True)
class Chunk:
    """Several new tokens of one sequence."""

    start: int  # its tokens among the step's: start … end
    end: int
    past: int
    blocks: Tensor | None  # its block table; None: no past
    masks: tuple[Tensor, ...]  # (TILE, past + rows so far) each, 0 or -inf


@dataclass(frozen=True, slots=True)
class Plan:
    """The attention of one step, the same for every layer."""

    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]
    block_size: int


def plan_attention(num_computed: Ints, num_new: Ints, block_tables: Ints, block_size: int, like: Tensor) -> Plan:
    """Prepare once what the attention of every layer needs. Rows of one new token come first. `like`: type, device."""
    ends = np.cumsum(num_new)
    num_decodes = int(np.count_nonzero(num_new == 1))
    lengths = num_computed + num_new
    chunks = [
        _plan_chunk(int(ends[row] - num_new[row]), int(ends[row]), int(num_computed[row]), block_tables[row],
                    block_size, like)
        for row in range(num_decodes, len(num_new))
    ]  # fmt: skip
    groups: list[DecodeGroup] = []
    if num_decodes:
        blocks = -(-lengths[:num_decodes] // block_size)
        if int(blocks.max()) <= 2 * int(blocks.min()):
            sizes = np.zeros(num_decodes, dtype=np.int64)  # all alike, as they mostly are
        else:
            sizes = np.ceil(np.log2(blocks)).astype(np.int64)  # alike: within the same power of two
        for size in np.unique(sizes) if sizes.any() else (0,):
            members = np.flatnonzero(sizes == size)
            everything = len(members) == num_decodes and not chunks
            groups.append(_plan_group(members, lengths[members], block_tables, block_size, like, everything))
    return Plan(tuple(groups), tuple(chunks), block_size)


def _plan_group(
    members: Ints, lengths: Ints, block_tables: Ints, block_size: int, like: Tensor, everything: bool
) -> DecodeGroup:
    longest = int(lengths.max())
    blocks = block_tables[members, : -(-longest // block_size)]
    mask = None
    if int(lengths.min()) < longest:
        visible = np.arange(longest) < lengths[:, None]
        mask = _additive(torch.from_numpy(visible), like)[:, None, None, :]
    return DecodeGroup(
        tokens=None if everything else torch.from_numpy(members).to(like.device),
        blocks=torch.from_numpy(blocks.reshape(-1)).to(like.device),
        batch=len(members),
        length=longest,
        mask=mask,
    )


def _plan_chunk(start: int, end: int, past: int, block_table: Ints, block_size: int, like: Tensor) -> Chunk:
    if past == 0:
        return Chunk(start, end, 0, None, ())
    masks = []
    for first in range(past, past + end - start, TILE):
        last = min(first + TILE, past + end - start)
        masks.append(_additive(torch.arange(last)[None, :] <= torch.arange(first, last)[:, None], like))
    blocks = block_table[: -(-(past + end - start) // block_size)]
    return Chunk(start, end, past, torch.from_numpy(blocks.copy()).to(like.device), tuple(masks))


def _additive(visible: Tensor, like: Tensor) -> Tensor:
    mask = torch.zeros(visible.shape, dtype=like.dtype)
    return mask.masked_fill_(~visible, float("-inf")).to(like.device)


def paged_attention(q: Tensor, kv: Tensor, cache: Tensor, plan: Plan, scale: float) -> Tensor:
    """softmax(q·k * scale) · v over all tokens of the same sequence up to the query's own."""
    num_tokens, num_heads, head_dim = q.shape
    if len(plan.groups) == 1 and plan.groups[0].tokens is None:
        return _decode(q, cache, plan.groups[0], plan.block_size, scale).reshape(num_tokens, num_heads * head_dim)
    out = q.new_empty(num_tokens, num_heads, head_dim)
    for group in plan.groups:
        assert group.tokens is not None
        members = q.index_select(0, group.tokens)
        attended = _decode(members, cache, group, plan.block_size, scale)
        out.index_copy_(0, group.tokens, attended.reshape(group.batch, num_heads, head_dim))
    for chunk in plan.chunks:
        _extend(q, kv, cache, chunk, plan.block_size, scale, out)
    return out.view(num_tokens, num_heads * head_dim)


def _gather(cache: Tensor, blocks: Tensor, block_size: int) -> Tensor:
    """(tokens, 2, Hkv, D) of these blocks."""
    rows = cache.view(cache.shape[0] // block_size, -1).index_select(0, blocks)
    return rows.view(-1, *cache.shape[1:])


def _decode(q: Tensor, cache: Tensor, group: DecodeGroup, block_size: int, scale: float) -> Tensor:
    """q: (B, Hq, D) -> (B, Hkv, G, D)."""
    num_kv_heads, head_dim = cache.shape[2:]
    kv = _gather(cache, group.blocks, block_size).view(group.batch, -1, 2, num_kv_heads, head_dim)
    k, v = kv[:, : group.length].permute(2, 0, 3, 1, 4)  # each (B, Hkv, length, D)
    folded = q.reshape(group.batch, num_kv_heads, -1, head_dim)  # (B, Hkv, G, D): reads each key once for G heads
    return F.scaled_dot_product_attention(folded, k, v, attn_mask=group.mask, scale=scale)


def _extend(q: Tensor, kv: Tensor, cache: Tensor, chunk: Chunk, block_size: int, scale: float, out: Tensor) -> None:
    num_kv_heads, head_dim = cache.shape[2:]
    rows = slice(chunk.start, chunk.end)
    queries = q[rows].reshape(chunk.end - chunk.start, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)  # (Hkv, G, n, D)
    into = out[rows].view(chunk.end - chunk.start, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    seen = kv[rows] if chunk.blocks is None else _gather(cache, chunk.blocks, block_size)
    # The query heads of a KV head read the same keys: a stride of zero instead of a copy.
    k, v = seen.permute(1, 2, 0, 3).unsqueeze(2).expand(2, num_kv_heads, queries.shape[1], -1, head_dim)
    if chunk.blocks is None:
        into.copy_(F.scaled_dot_product_attention(queries, k, v, is_causal=True, scale=scale))
        return
    for index, mask in enumerate(chunk.masks):
        tile = slice(index * TILE, index * TILE + mask.shape[0])
        end = mask.shape[1]
        into[:, :, tile] = F.scaled_dot_product_attention(
            queries[:, :, tile], k[:, :, :end], v[:, :, :end], attn_mask=mask, scale=scale
        )
