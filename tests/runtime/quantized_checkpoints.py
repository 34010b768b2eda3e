"""Writers of quantized checkpoints, packed number by number as the formats' documents say, with what the codes mean.

Nothing here uses the engine's readers: each writer returns the tensors of a matrix and its numbers, worked out apart.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

Written = tuple[dict[str, Tensor], Tensor]  # tensors by the name behind the matrix's, and its numbers (out, in)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that nibble 0, 1, … of a word holds


def fp8_tensor(weight: Tensor) -> Written:
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.7)}, codes.float() * scale


def fp8_rows(weight: Tensor) -> Written:
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale.to(torch.bfloat16)}, codes.float() * scale.to(torch.bfloat16)


def fp8_blocks(weight: Tensor) -> Written:
    numbers, codes = torch.empty_like(weight), torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            own = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scales[i, j] = weight[own].abs().max() / 448
            codes[own] = (weight[own] / scales[i, j]).to(torch.float8_e4m3fn)
            numbers[own] = codes[own].float() * scales[i, j]
    return {"weight": codes, "weight_scale_inv": scales}, numbers


def int8_rows(weight: Tensor) -> Written:
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def pack_quantized(weight: Tensor, group: int = 32, *, symmetric: bool = True, permuted: bool = False) -> Written:
    """compressed-tensors of four bits: words along the inputs."""
    (out_size, in_size), groups = weight.shape, weight.shape[1] // group
    group_of = _shuffled(in_size) // group if permuted else torch.arange(in_size) // group
    scales, zeros = torch.empty(out_size, groups), torch.zeros(out_size, groups, dtype=torch.int32)
    for g in range(groups):
        own = weight[:, group_of == g]
        if symmetric:
            scales[:, g] = own.abs().amax(1) / 7
        else:
            scales[:, g] = (own.amax(1) - own.amin(1)) / 15
            zeros[:, g] = (-own.amin(1) / scales[:, g]).round() - 8
    codes = (weight / scales[:, group_of]).round().int() + zeros[:, group_of]
    codes = codes.clamp(-8, 7)
    tensors = {
        "weight_packed": words((codes + 8).numpy(), axis=1),
        "weight_scale": scales,
        "weight_shape": torch.tensor([out_size, in_size]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words((zeros + 8).numpy(), axis=0)
    if permuted:
        tensors["weight_g_idx"] = group_of.int()
    return tensors, (codes - zeros[:, group_of]).float() * scales[:, group_of]


def gptq(weight: Tensor, group: int = 32, *, permuted: bool = False, bits: int = 4) -> Written:
    codes, scales, zeros, group_of = _asymmetric(weight, group, bits, permuted=permuted)
    tensors = {
        "qweight": words(codes.T.numpy(), axis=0, bits=bits),
        "qzeros": words((zeros.T - 1).numpy(), axis=1, bits=bits),
        "scales": scales.T.contiguous().half(),
        "g_idx": group_of.int(),
        "bias": torch.zeros(len(weight), dtype=torch.float16),
    }
    return tensors, (codes - zeros[:, group_of]).float() * scales.half().float()[:, group_of]


def awq(weight: Tensor, group: int = 32) -> Written:
    codes, scales, zeros, group_of = _asymmetric(weight, group, 4, permuted=False)
    tensors = {
        "qweight": words(codes.T.numpy(), axis=1, order=AWQ_ORDER),
        "qzeros": words(zeros.T.numpy(), axis=1, order=AWQ_ORDER),
        "scales": scales.T.contiguous().half(),
    }
    return tensors, (codes - zeros[:, group_of]).float() * scales.half().float()[:, group_of]


def _asymmetric(weight: Tensor, group: int, bits: int, *, permuted: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes (out, in), scales and zeros (out, groups), and the group of each input."""
    in_size, most = weight.shape[1], (1 << bits) - 1
    group_of = _shuffled(in_size) // group if permuted else torch.arange(in_size) // group
    scales, zeros = torch.empty(len(weight), in_size // group), torch.empty(len(weight), in_size // group)
    for g in range(in_size // group):
        own = weight[:, group_of == g]
        scales[:, g] = (own.amax(1).clamp_min(0) - own.amin(1).clamp_max(0)) / most
        zeros[:, g] = (-own.amin(1).clamp_max(0) / scales[:, g]).round().clamp(1, most)
    scales = scales.half().float()
    codes = ((weight / scales[:, group_of]).round() + zeros[:, group_of]).clamp(0, most)
    return codes.int(), scales, zeros.int(), group_of


def words(codes: np.ndarray, axis: int, bits: int = 4, order: tuple[int, ...] | None = None) -> Tensor:
    """Codes side by side along `axis` in words of 32 bits; `order`: which of them each part of a word holds."""
    per_word = 32 // bits
    moved = np.moveaxis(codes, axis, -1).astype(np.int64)
    padding = -moved.shape[-1] % per_word
    moved = np.pad(moved, [(0, 0)] * (moved.ndim - 1) + [(0, padding)])
    packed = np.zeros((*moved.shape[:-1], moved.shape[-1] // per_word), dtype=np.int64)
    for word in range(packed.shape[-1]):
        for part in range(per_word):
            of = part if order is None else order[part]
            packed[..., word] |= moved[..., word * per_word + of] << (bits * part)
    return torch.from_numpy(np.moveaxis(packed, -1, axis).astype(np.uint32).view(np.int32).copy())


def quantize_state(
    state: dict[str, Tensor], write: Callable[[Tensor], Written], *, keep: tuple[str, ...] = ("lm_head",)
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A checkpoint's tensors with its matrices quantized, and the numbers that they now stand for."""
    stored, meant = {}, {}
    for name, tensor in state.items():
        matrix = name.removesuffix(".weight")
        plain = not name.endswith("proj.weight") or any(word in name for word in keep)
        if plain:
            stored.setdefault(name, tensor)
            meant[name] = tensor
            continue
        tensors, meant[name] = write(tensor)
        own_bias = f"{matrix}.bias" in state
        for suffix, value in tensors.items():
            if not (suffix == "bias" and own_bias):
                stored[f"{matrix}.{suffix}"] = value.contiguous()
    return stored, meant


def _shuffled(in_size: int) -> Tensor:
    """Matrices with the same inputs see the same activations, so they have the same order."""
    return torch.randperm(in_size, generator=torch.Generator().manual_seed(in_size))
