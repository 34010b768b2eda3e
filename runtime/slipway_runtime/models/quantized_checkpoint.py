"""Reads the matrices of quantized checkpoints: fp8, compressed-tensors, GPTQ, AWQ, MXFP4.

| quant_method, format             | tensors of a matrix `name`                   | read as                         |
|----------------------------------|----------------------------------------------|---------------------------------|
| fp8                              | weight, weight_scale or weight_scale_inv     | float8: one scale, rows, blocks |
| compressed-tensors, float-quant. | weight, weight_scale                         | the same                        |
| …, int-quantized                 | weight, weight_scale                         | int8: rows or groups            |
| …, pack-quantized                | weight_packed, weight_scale, weight_shape, … | 4 or 8 bits: rows or groups     |
| gptq                             | qweight, qzeros, scales, g_idx               | 4 or 8 bits: groups, any order  |
| awq, gemm                        | qweight, qzeros, scales                      | 4 bits: groups                  |
| mxfp4                            | of gpt-oss's experts: …_blocks, …_scales     | the codes on a GPU, or numbers  |

A matrix in high precision, such as lm_head, is a plain `weight` in the file and is not converted: the file decides for
each matrix, not the lists of the configuration. Scales of activations and of a KV cache are not needed: rows of x and
tokens of the cache, if quantized here, are scaled by their own largest value.
"""

import re
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from slipway_runtime.layers.quantized_weight import QuantizedWeight, Weight
from slipway_runtime.models.checkpoint import Checkpoint
from slipway_runtime.models.config_values import ModelRefusedError, shown

METHODS: Final = ("fp8", "compressed-tensors", "gptq", "awq", "mxfp4")
_FORMATS: Final = ("float-quantized", "int-quantized", "pack-quantized", "naive-quantized", "dense")
_NOT_NEEDED: Final = re.compile(
    r"\.(input_scale|input_zero_point|input_global_scale|output_scale|activation_scale|k_scale|v_scale|q_scale"
    r"|weight_shape|weight_g_idx|g_idx|qzeros)$"
)
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of a word that holds output 0, 1, …


@dataclass(frozen=True, slots=True)
class QuantizedFormat:
    """The settings of a quantization_config that the tensors do not show themselves."""

    method: str
    bits: int = 8
    group: int = 0  # columns that share a scale; 0: given by the tensors' shapes
    zero_offset: int = 0  # added to the stored zeros
    rounds_inputs: bool = False
    symmetric: bool = True

    @property
    def name(self) -> str:
        """The common name: fp8, int8, int4, mxfp4."""
        return self.method if self.method in ("fp8", "mxfp4") else f"int{self.bits}"


def parse_quantization(raw: dict[str, Any] | None) -> QuantizedFormat | None:
    """The format that config.json names; None: the checkpoint has plain numbers. Raises ModelRefusedError."""
    if raw is None:
        return None
    method = raw.get("quant_method")
    if method not in METHODS:
        raise ModelRefusedError(f"config.json: quant_method is {shown(method)}; {', '.join(METHODS)} are supported")
    match method:
        case "fp8":
            if raw.get("fmt", "e4m3") != "e4m3":
                raise ModelRefusedError(f"config.json: float8 of the format {shown(raw['fmt'])} is not supported")
            return QuantizedFormat("fp8", rounds_inputs=True)
        case "mxfp4":
            return QuantizedFormat("mxfp4", bits=4)
        case "compressed-tensors":
            return _compressed(raw)
    bits, group = _whole(raw, "bits", 4), _whole(raw, "group_size", -1)
    if bits not in ((4,) if method == "awq" else (4, 8)):
        raise ModelRefusedError(f"config.json: {method} with {bits} bits is not supported")
    if method == "awq":
        if str(raw.get("version", "gemm")).lower() != "gemm":
            raise ModelRefusedError(
                f"config.json: awq of the version {shown(raw['version'])}; only 'gemm' is supported"
            )
        return QuantizedFormat("awq", bits, max(group, 0), symmetric=False)
    second = raw.get("checkpoint_format") == "gptq_v2"
    return QuantizedFormat("gptq", bits, max(group, 0), zero_offset=0 if second else 1, symmetric=False)


def _compressed(raw: dict[str, Any]) -> QuantizedFormat:
    groups = raw.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ModelRefusedError("config.json: quantization_config has no config_groups")
    found = set()
    for about in groups.values():
        weights = about.get("weights") if isinstance(about, dict) else None
        if not isinstance(weights, dict):
            raise ModelRefusedError("config.json: a config_group without weights is not supported")
        form = about.get("format") or raw.get("format")
        kind, bits = weights.get("type"), _whole(weights, "num_bits", 8)
        fits = (kind == "float" and bits == 8) or (kind == "int" and bits in (4, 8))
        if form not in _FORMATS or not fits:
            raise ModelRefusedError(
                f"config.json: compressed-tensors, format {shown(form)} with {kind} of {bits} bits, is not supported"
            )
        found.add(
            QuantizedFormat(
                "fp8" if kind == "float" else "pack" if form == "pack-quantized" else "int",
                bits,
                max(_whole(weights, "group_size", 0), 0),
                rounds_inputs=isinstance(about.get("input_activations"), dict),
                symmetric=bool(weights.get("symmetric", True)),
            )
        )
    if len(found) > 1:
        raise ModelRefusedError("config.json: matrices of several quantized formats in one model are not supported")
    return found.pop()


def _whole(raw: dict[str, Any], key: str, default: int) -> int:
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < -1:
        raise ModelRefusedError(f"config.json: {key} is {shown(value)}; a whole number is needed")
    return value


class WeightReader:
    """Reads matrices of a checkpoint, plain or quantized."""

    def __init__(self, checkpoint: Checkpoint, form: QuantizedFormat | None, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._form = form
        self._dtype = dtype
        if form is not None:
            checkpoint.ignore_if(lambda name: _NOT_NEEDED.search(name) is not None)

    def matrix(self, name: str, out_size: int, in_size: int, rows: slice | None = None) -> Weight:
        """The matrix `name` (without ".weight"), or some of its rows, in the format of the file."""
        form, checkpoint = self._form, self._checkpoint
        plain = f"{name}.weight"
        if form is None or (plain in checkpoint and checkpoint.dtype_of(plain).itemsize > 1):
            return checkpoint.take(plain, out_size, in_size, rows=rows)
        match form.method:
            case "fp8" | "int":
                read = self._one_byte(name, out_size, in_size)
            case "pack":
                read = self._packed(name, out_size, in_size)
            case "gptq" | "awq":
                read = (
                    self._gptq(name, out_size, in_size) if form.method == "gptq" else self._awq(name, out_size, in_size)
                )
                self._drop_bias_of_zeros(name)
            case _:
                return checkpoint.take(
                    plain, out_size, in_size, rows=rows
                )  # raises an error that names the tensor and its dtype
        return read if rows is None else read.rows(rows)

    def _one_byte(self, name: str, out_size: int, in_size: int) -> QuantizedWeight:
        codes = self._raw(f"{name}.weight")
        _check(f"{name}.weight", codes, out_size, in_size)
        if codes.dtype not in (torch.int8, torch.float8_e4m3fn):
            raise ModelRefusedError(f"{name}.weight holds {codes.dtype}: this quantized format is not supported")
        suffix = "weight_scale_inv" if f"{name}.weight_scale_inv" in self._checkpoint else "weight_scale"
        scales = self._raw(f"{name}.{suffix}").float()
        zeros = None
        if f"{name}.weight_zero_point" in self._checkpoint:
            zeros = self._raw(f"{name}.weight_zero_point").float()
        scales, group = _by_row(f"{name}.{suffix}", scales, out_size, in_size)
        if zeros is not None:
            zeros, _ = _by_row(f"{name}.weight_zero_point", zeros, out_size, in_size)
            zeros = None if not zeros.any() else zeros
        assert self._form is not None
        return QuantizedWeight(codes, scales, group, self._dtype, zeros=zeros, rounds_inputs=self._form.rounds_inputs)

    def _packed(self, name: str, out_size: int, in_size: int) -> QuantizedWeight:
        """compressed-tensors: words packed along the inputs, low bits first; codes and zeros are stored unsigned."""
        assert self._form is not None
        bits = self._form.bits
        codes = unpack(self._raw(f"{name}.weight_packed"), bits, dim=1)[:, :in_size]
        _check(f"{name}.weight_packed", codes, out_size, in_size)
        scales, group = _by_row(f"{name}.weight_scale", self._raw(f"{name}.weight_scale").float(), out_size, in_size)
        zeros = torch.full_like(scales, 1 << (bits - 1))
        if f"{name}.weight_zero_point" in self._checkpoint:
            packed = self._raw(f"{name}.weight_zero_point")
            zeros = (
                unpack(packed, bits, dim=0)[:out_size].float()
                if packed.dtype == torch.int32
                else packed.float() + zeros
            )
        order = None
        if f"{name}.weight_g_idx" in self._checkpoint:
            order = _order(f"{name}.weight_g_idx", self._raw(f"{name}.weight_g_idx"), in_size, group)
        return self._grouped(codes, scales, group, zeros, order)

    def _gptq(self, name: str, out_size: int, in_size: int) -> QuantizedWeight:
        """GPTQ: words packed along the inputs, low bits first; version 1 of the format stores zeros minus one."""
        assert self._form is not None
        form = self._form
        codes = unpack(self._raw(f"{name}.qweight"), form.bits, dim=0).T
        _check(f"{name}.qweight", codes, out_size, in_size)
        scales = self._raw(f"{name}.scales").float().T
        zeros = unpack(self._raw(f"{name}.qzeros"), form.bits, dim=1).T[:out_size] + form.zero_offset
        group = form.group or in_size
        order = None
        if f"{name}.g_idx" in self._checkpoint:
            order = _order(f"{name}.g_idx", self._raw(f"{name}.g_idx"), in_size, group)
        return self._grouped(codes, scales, group, zeros.float(), order)

    def _awq(self, name: str, out_size: int, in_size: int) -> QuantizedWeight:
        """AWQ: words packed along the outputs, in the order _AWQ_ORDER within a word."""
        assert self._form is not None
        codes = _awq_order(unpack(self._raw(f"{name}.qweight"), 4, dim=1)).T
        _check(f"{name}.qweight", codes, out_size, in_size)
        zeros = _awq_order(unpack(self._raw(f"{name}.qzeros"), 4, dim=1)).T.float()
        scales = self._raw(f"{name}.scales").float().T
        return self._grouped(codes, scales, self._form.group or in_size, zeros, None)

    def _grouped(
        self, codes: Tensor, scales: Tensor, group: int, zeros: Tensor, order: Tensor | None
    ) -> QuantizedWeight:
        assert self._form is not None
        groups = -(-codes.shape[1] // group)
        if scales.shape != (codes.shape[0], groups) or zeros.shape != scales.shape:
            raise ModelRefusedError(
                f"a matrix of {tuple(codes.shape)} in groups of {group} has scales of {tuple(scales.shape)} and zeros "
                f"of {tuple(zeros.shape)}"
            )
        if order is not None:
            codes = codes[:, order]
        return QuantizedWeight(
            codes.to(torch.uint8).contiguous(),
            scales.contiguous(),
            group,
            self._dtype,
            zeros=zeros.contiguous(),
            order=order,
            bits=self._form.bits,
        )

    def _drop_bias_of_zeros(self, name: str) -> None:
        """Ignore an all-zero bias: GPTQ tools write one for each matrix of a model without biases."""
        bias = f"{name}.bias"
        if bias in self._checkpoint and not self._raw(bias, taken=False).any():
            self._checkpoint.ignore(bias)

    def _raw(self, name: str, *, taken: bool = True) -> Tensor:
        return self._checkpoint.take_raw(name, taken=taken)


def unpack(words: Tensor, bits: int, dim: int) -> Tensor:
    """Unpack the codes in int32 words, low bits first, along `dim`: (…, n, …) -> (…, n · 32 / bits, …), int32."""
    if words.dtype != torch.int32 or words.dim() != 2:
        raise ModelRefusedError(f"packed codes of {words.dtype} in {words.dim()} dimensions: two of int32 are needed")
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    codes = words.unsqueeze(dim + 1) >> (shifts[:, None] if dim == 0 else shifts)
    return (codes & ((1 << bits) - 1)).flatten(dim, dim + 1)


def _awq_order(codes: Tensor) -> Tensor:
    order = torch.tensor(_AWQ_ORDER, device=codes.device)
    return codes.view(codes.shape[0], -1, 8)[:, :, order].flatten(1)


def _order(name: str, group_of: Tensor, in_size: int, group: int) -> Tensor | None:
    """Column indices sorted by group; None: the columns are already sorted."""
    if group_of.shape != (in_size,):
        raise ModelRefusedError(f"{name} has the shape {tuple(group_of.shape)}; {in_size} inputs need a group each")
    sorted_groups, order = group_of.long().sort(stable=True)
    if not torch.equal(sorted_groups, torch.arange(in_size, device=group_of.device) // group):
        raise ModelRefusedError(f"{name}: groups of other sizes than {group} are not supported")
    return None if torch.equal(order, torch.arange(in_size, device=order.device)) else order


def _check(name: str, codes: Tensor, out_size: int, in_size: int) -> None:
    if codes.shape != (out_size, in_size):
        raise ModelRefusedError(
            f"{name} holds a matrix of {tuple(codes.shape)}; config.json says {(out_size, in_size)}"
        )


def _by_row(name: str, scales: Tensor, out_size: int, in_size: int) -> tuple[Tensor, int]:
    """Scales of any granularity as (out, groups), and the columns of a group.

    | shape               | granularity                                   |
    |---------------------|-----------------------------------------------|
    | () or (1,)          | the matrix                                    |
    | (out,) or (out, 1)  | a row                                         |
    | (out, n)            | in / n columns of a row                       |
    | (m, n)              | blocks of 128 × 128, the last ones cut        |
    """
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(out_size, 1).contiguous(), in_size
    if scales.shape in ((out_size,), (out_size, 1)):
        return scales.reshape(out_size, 1), in_size
    if scales.dim() == 2 and scales.shape[0] == out_size and in_size % scales.shape[1] == 0:
        return scales, in_size // scales.shape[1]
    if scales.dim() == 2 and scales.shape == (-(-out_size // 128), -(-in_size // 128)):
        return scales.repeat_interleave(128, 0)[:out_size].contiguous(), 128
    raise ModelRefusedError(
        f"{name} has the shape {tuple(scales.shape)}: no scales of a matrix of {(out_size, in_size)}"
    )
