"""Linear layer: y = x Wᵀ + b, and the LoRA hook that adds an adapter's output."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slipway_runtime.layers.matmul import MakeMatmul, Matmul
from slipway_runtime.layers.quantized_weight import Weight, concatenated
from slipway_runtime.layers.step import StepContext


class LoraHook(Protocol):
    """Adds the LoRA output of the step's adapters to a linear layer's output."""

    def __call__(self, x: Tensor, y: Tensor, step: StepContext) -> None:
        """x: (T, in)  y: (T, out), added to in place. Only called when `step.lora` is not None."""


Reduce = Callable[[Tensor], Tensor]  # all-reduce: sums a tensor over all ranks that share a layer, in place


@dataclass(frozen=True, slots=True)
class Part:
    """One of the checkpoint's matrices inside a merged one: the outputs `start` … `end`."""

    name: str  # such as "model.layers.3.self_attn.q_proj"
    start: int
    end: int


class Linear:
    """A matrix with its bias; `parts` lists the checkpoint's matrices in it, in the order of outputs.

    With `reduce` the matrix has only this rank's inputs, and its product is one summand of y.
    """

    __slots__ = ("bias", "lora", "matmul", "parts", "reduce")

    def __init__(
        self,
        matmul: Matmul,
        bias: Tensor | None = None,
        *,
        parts: tuple[Part, ...] = (),
        reduce: Reduce | None = None,
    ) -> None:
        self.matmul = matmul
        self.bias = bias  # (out,)
        self.parts = parts
        self.reduce = reduce
        self.lora: LoraHook | None = None

    def __call__(self, x: Tensor, step: StepContext | None = None) -> Tensor:
        """x: (T, in) -> (T, out)."""
        y = self.matmul(x)
        if self.bias is not None:
            y += self.bias
        if self.lora is not None and step is not None and step.lora is not None:
            self.lora(x, y, step)
        return y if self.reduce is None else self.reduce(y)

    @property
    def in_features(self) -> int:
        """Numbers in a row of x."""
        return self.matmul.in_features

    @property
    def out_features(self) -> int:
        """Numbers in a row of y."""
        return self.matmul.out_features

    @property
    def nbytes(self) -> int:
        """Memory of weights and bias."""
        return self.matmul.nbytes + (0 if self.bias is None else self.bias.nbytes)

    @classmethod
    def merged(
        cls, parts: Sequence[tuple[str, Weight, Tensor | None]], make: MakeMatmul, reduce: Reduce | None = None
    ) -> "Linear":
        """One matrix whose output is the parts' outputs concatenated: one call instead of several.

        parts: the checkpoint's name, weight (out, in) and bias (out,) of each.
        """
        weight = concatenated([weight for _, weight, _ in parts])
        bias = None
        known = next((own for _, _, own in parts if own is not None), None)
        if known is not None:
            bias = torch.cat([known.new_zeros(len(weight)) if own is None else own for _, weight, own in parts])
        named, start = [], 0
        for name, own_weight, _ in parts:
            named.append(Part(name, start, start + len(own_weight)))
            start += len(own_weight)
        return cls(make(weight), bias, parts=tuple(named), reduce=reduce)
