"""Norms: alone or of a sum, the result in the number format that the next matrix wants."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor, nn

from kestrel.kernels.ops import PLAIN, Ops
from kestrel.layers.linear import Fp8Rows, Linear, Rows

Pending: TypeAlias = tuple[Tensor, ...]
"""What is still to be added to the residual stream: nothing, or one or two deltas."""


class LayerNorm(nn.LayerNorm):
    ops: Ops = PLAIN
    shift_D: Tensor | None = None
    """What every row lacks yet: biases that the matrices before this norm left out (`Linear.bias_in_norms`)."""

    def forward(self, x_TD: Tensor, /) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.ops.layer_norm(x_TD, self.weight, self.bias, self.eps, self.shift_D)

    def of_sum(self, x_TD: Tensor, pending: Pending, *, to_fp8: bool = False) -> tuple[Tensor, Rows]:
        """(x with what is pending added, its norm)."""
        parameters = (self.weight, self.bias, self.eps)
        if to_fp8:
            if not pending:
                return x_TD, Fp8Rows(*self.ops.layer_norm_to_fp8(x_TD, *parameters, self.shift_D))
            x_TD, *rows = self.ops.add_layer_norm_to_fp8(x_TD, *_two(pending), *parameters)
            return x_TD, Fp8Rows(*rows)
        return self.ops.add_layer_norm(x_TD, *_two(pending), *parameters) if pending else (x_TD, self(x_TD))


class RmsNorm(nn.Module):
    ops: Ops = PLAIN

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.ops.rms_norm(x_TD, self.weight, self.eps)

    def of_sum(self, x_TD: Tensor, pending: Pending, *, to_fp8: bool = False) -> tuple[Tensor, Rows]:
        """(x with what is pending added, its norm)."""
        if to_fp8:
            if not pending:
                return x_TD, Fp8Rows(*self.ops.rms_norm_to_fp8(x_TD, self.weight, self.eps))
            x_TD, *rows = self.ops.add_rms_norm_to_fp8(x_TD, *_two(pending), self.weight, self.eps)
            return x_TD, Fp8Rows(*rows)
        return self.ops.add_rms_norm(x_TD, *_two(pending), self.weight, self.eps) if pending else (x_TD, self(x_TD))


Norm: TypeAlias = LayerNorm | RmsNorm


def _two(pending: Pending) -> tuple[Tensor, Tensor | None]:
    return pending[0], pending[1] if len(pending) > 1 else None


def add_and_norm(
    x_TD: Tensor, linear: Linear, rows: Rows, norm: LayerNorm, *, to_fp8: bool = False
) -> tuple[Tensor, Rows]:
    """(x + linear(rows), its norm). x is changed in place where the norms add the layer's bias."""
    if linear.bias_in_norms:
        return norm.of_sum(linear.add_to(x_TD, rows), (), to_fp8=to_fp8)
    return norm.of_sum(x_TD, (linear(rows),), to_fp8=to_fp8)
