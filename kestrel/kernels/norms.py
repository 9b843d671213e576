"""Layer and RMS normalisation, alone and together with the sum that feeds them.

    layer norm:  normed = (x - mean) / sqrt(var + eps) · weight + bias      var over D, not D - 1
    RMS norm:    normed = x / sqrt(mean(x²) + eps) · weight

Means are those of one row, in fp32. An RMS norm rounds to the dtype of x before the weight is applied, as the published
models do. A layer norm may be given what all rows lack yet: x stands for x + shift then, which is not rounded.
The versions `add` make the residual stream first: sum = x + a + b, added in fp32 and rounded once to the dtype of x.
What is normalised is the rounded sum, so that a later reader of the stream sees the same numbers.

The versions `to_fp8` give the normed rows as `rows_to_fp8` would; those of a layer norm from fp32, not rounded to the
dtype of x before.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kestrel.kernels.fp8 import rows_to_fp8


def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float, shift_D: Tensor | None = None) -> Tensor:
    """Rows, plus `shift_D`, normalised over their last dimension; any number of leading dimensions."""
    assert weight_D.shape == bias_D.shape == x_TD.shape[-1:]
    if shift_D is None:
        return functional.layer_norm(x_TD, weight_D.shape, weight_D, bias_D, eps)
    wide_TD = (x_TD if x_TD.element_size() > 4 else x_TD.float()) + shift_D
    dtype = wide_TD.dtype
    return functional.layer_norm(wide_TD, weight_D.shape, weight_D.to(dtype), bias_D.to(dtype), eps).to(x_TD.dtype)


def add_layer_norm(
    x_TD: Tensor, delta_a_TD: Tensor, delta_b_TD: Tensor | None, weight_D: Tensor, bias_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(sum, normed sum), both of the shape and dtype of x. A delta `a` of fewer rows repeats."""
    total = residual_sum(x_TD, delta_a_TD, delta_b_TD)
    return total, layer_norm(total, weight_D, bias_D, eps)


def layer_norm_to_fp8(
    x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float, shift_D: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(normed rows in float8 [T, D], their scales [T, 1] fp32)."""
    return rows_to_fp8(layer_norm(x_TD.float(), weight_D.float(), bias_D.float(), eps, shift_D))


def add_layer_norm_to_fp8(
    x_TD: Tensor, delta_a_TD: Tensor, delta_b_TD: Tensor | None, weight_D: Tensor, bias_D: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(sum in the dtype of x, normed sum in float8, its scales [T, 1] fp32). A delta `a` of fewer rows repeats."""
    total = residual_sum(x_TD, delta_a_TD, delta_b_TD)
    return total, *layer_norm_to_fp8(total, weight_D, bias_D, eps)


def residual_sum(x_TD: Tensor, delta_a_TD: Tensor, delta_b_TD: Tensor | None) -> Tensor:
    """x + a + b, rounded once. Numbers finer than fp32 stay so."""
    if x_TD.element_size() >= 4 and delta_a_TD.shape == x_TD.shape:
        total = x_TD + delta_a_TD
        return total if delta_b_TD is None else total + delta_b_TD
    wide = x_TD if x_TD.element_size() > 4 else x_TD.float()
    if delta_a_TD.shape != x_TD.shape:
        wide = wide.unflatten(0, (-1, len(delta_a_TD)))
    total = (wide + delta_a_TD).view(x_TD.shape)
    return (total if delta_b_TD is None else total + delta_b_TD).to(x_TD.dtype)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Rows normalised over their last dimension; any number of leading dimensions."""
    assert weight_D.shape == x_TD.shape[-1:]
    wide_TD = x_TD if x_TD.element_size() > 4 else x_TD.float()
    normed_TD = wide_TD * torch.rsqrt(wide_TD.square().mean(-1, keepdim=True) + eps)
    return weight_D * normed_TD.to(x_TD.dtype)


def add_rms_norm(
    x_TD: Tensor, delta_a_TD: Tensor, delta_b_TD: Tensor | None, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(sum, normed sum), both of the shape and dtype of x."""
    total = residual_sum(x_TD, delta_a_TD, delta_b_TD)
    return total, rms_norm(total, weight_D, eps)


def rms_norm_to_fp8(x_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed rows in float8 [T, D], their scales [T, 1] fp32)."""
    return rows_to_fp8(rms_norm(x_TD, weight_D, eps))


def add_rms_norm_to_fp8(
    x_TD: Tensor, delta_a_TD: Tensor, delta_b_TD: Tensor | None, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(sum in the dtype of x, normed sum in float8, its scales [T, 1] fp32)."""
    total = residual_sum(x_TD, delta_a_TD, delta_b_TD)
    return total, *rms_norm_to_fp8(total, weight_D, eps)
