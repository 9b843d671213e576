"""Layer normalisation, alone and together with the sum that feeds it.

    mean, var = of one row, fp32 (var over D, not D - 1)
    normed    = (x - mean) / sqrt(var + eps) · weight + bias

`add_layer_norm` makes the residual stream first: sum = x + a + b, added in fp32 and rounded once to the dtype of x.
What is normalised is the rounded sum, so that a later reader of the stream sees the same numbers.

The versions `to_fp8` give the normed rows as `rows_to_fp8` would, from fp32: they are not rounded to the dtype of x
before.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from kestrel.kernels.fp8_rows import rows_to_fp8


def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    """Rows normalised over their last dimension; any number of leading dimensions."""
    assert weight_D.shape == bias_D.shape == x_TD.shape[-1:]
    return functional.layer_norm(x_TD, weight_D.shape, weight_D, bias_D, eps)


def add_layer_norm(
    x_TD: Tensor, delta_a_TD: Tensor, delta_b_TD: Tensor | None, weight_D: Tensor, bias_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(sum, normed sum), both of the shape and dtype of x."""
    assert x_TD.shape == delta_a_TD.shape
    total = add_deltas(x_TD, delta_a_TD, delta_b_TD)
    return total, layer_norm(total, weight_D, bias_D, eps)


def layer_norm_to_fp8(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed rows in float8 [T, D], their scales [T, 1] fp32)."""
    return rows_to_fp8(layer_norm(x_TD.float(), weight_D.float(), bias_D.float(), eps))


def add_layer_norm_to_fp8(
    x_TD: Tensor, delta_a_TD: Tensor, delta_b_TD: Tensor | None, weight_D: Tensor, bias_D: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(sum in the dtype of x, normed sum in float8, its scales [T, 1] fp32)."""
    assert x_TD.shape == delta_a_TD.shape
    total = add_deltas(x_TD, delta_a_TD, delta_b_TD)
    return total, *layer_norm_to_fp8(total, weight_D, bias_D, eps)


def add_deltas(x_TD: Tensor, delta_a_TD: Tensor, delta_b_TD: Tensor | None) -> Tensor:
    """x + a + b, rounded once. Numbers finer than fp32 stay so."""
    wide = x_TD if x_TD.element_size() > 4 else x_TD.float()
    total = wide + delta_a_TD
    return (total if delta_b_TD is None else total + delta_b_TD).to(x_TD.dtype)
