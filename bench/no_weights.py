"""A checkpoint without numbers, for steps of published models whose weights are not at hand."""

from typing import Any

import torch
from torch import Tensor

from slipway_runtime.models.adapter_weights import lora_modules
from slipway_runtime.models.config import ModelConfig
from slipway_runtime.models.quantized_checkpoint import parse_quantization


class NoWeights:
    """A checkpoint whose tensors have shapes, and on a real device random numbers."""

    def __init__(self, dtype: torch.dtype, config: ModelConfig, device: torch.device) -> None:
        """Of a model whose experts may be MXFP4, or its layers float8 in blocks of 128 × 128, AWQ or GPTQ in 4 bits."""
        form = parse_quantization(config.quantization)
        self.dtype = dtype
        self.device = device
        self._in_mxfp4 = form is not None and form.method == "mxfp4"
        self._in_float8 = lora_modules(config) if form is not None and form.method == "fp8" else {}
        self._in_int4 = lora_modules(config) if form is not None and form.method in ("awq", "gptq") else {}
        self._form = form
        self._shapes: dict[str, tuple[int, ...]] = {}

    def __contains__(self, name: str) -> bool:
        """Every matrix; of the tensors that only some checkpoints have, codes and scales."""
        module, _, leaf = name.rpartition(".")
        if module in self._in_int4:
            return leaf in ("qweight", "qzeros", "scales")
        is_scale = module in self._in_float8 and leaf == "weight_scale_inv"
        return leaf == "weight" or is_scale or (self._in_mxfp4 and name.endswith(("_blocks", "_scales")))

    def dtype_of(self, name: str) -> torch.dtype:
        """As `Checkpoint.dtype_of`."""
        return torch.float8_e4m3fn if name.removesuffix(".weight") in self._in_float8 else self.dtype

    def check_shape(self, name: str, *shape: int) -> None:
        """As `Checkpoint.check_shape`; any shape is right."""
        self._shapes[name] = shape

    def take_raw(self, name: str, *, taken: bool = True) -> Tensor:
        """As `Checkpoint.take_raw`, for codes and scales."""
        module, _, leaf = name.rpartition(".")
        if module in self._in_int4:
            return self._int4(leaf, *self._in_int4[module])
        if module not in self._in_float8:
            # Codes, and scales near 2⁰ of E8M0, so that sums of many products stay finite.
            low, high = (118, 122) if name.endswith("_scales") else (0, 256)
            return torch.randint(low, high, self._shapes[name], dtype=torch.uint8, device=self.device)
        out_size, in_size = self._in_float8[module]
        if leaf == "weight":
            return self._normal((out_size, in_size), torch.bfloat16).to(torch.float8_e4m3fn)
        return torch.full((-(-out_size // 128), -(-in_size // 128)), 1.0, device=self.device)

    def _int4(self, leaf: str, out_size: int, in_size: int) -> Tensor:
        """Eight codes are a word: of inputs in GPTQ's qweight, of outputs in all others."""
        assert self._form is not None
        groups = in_size // self._form.group
        if leaf == "scales":
            return self._normal((groups, out_size), torch.float16)
        if leaf == "qweight":
            shape = (in_size // 8, out_size) if self._form.method == "gptq" else (in_size, out_size // 8)
        else:
            shape = (groups, out_size // 8)
        return torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int32, device=self.device)

    def take(self, name: str, *shape: int, rows: slice | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """As `Checkpoint.take`."""
        first = shape[0] if rows is None else len(range(*rows.indices(shape[0])))
        return self._normal((first, *shape[1:]), dtype or self.dtype)

    def _normal(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Random: a GPU computes zeros faster than numbers. Small: sums of many products stay finite."""
        return torch.empty(shape, dtype=dtype, device=self.device).normal_(std=0.02)

    def in_parallel(self, make: Any, count: int) -> list[Any]:
        """As `Checkpoint.in_parallel`."""
        return [make(index) for index in range(count)]

    def ignore(self, name: str) -> None:
        """As `Checkpoint.ignore`."""

    def ignore_if(self, is_ignored: Any) -> None:
        """As `Checkpoint.ignore_if`."""
