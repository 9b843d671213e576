"""Root-mean-square normalisation, alone and together with the sum that feeds it.

    normed = x / sqrt(mean(x²) + eps) · weight        mean over one row, fp32

What is normalised is rounded to the dtype of x before the weight is applied, as the published models do. The sums are
those of `kestrel.kernels.layer_norm`; the versions `to_fp8` give the normed rows as `rows_to_fp8` would.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kestrel.kernels.fp8_rows import rows_to_fp8
from kestrel.kernels.layer_norm import add_deltas


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
    total = add_deltas(x_TD, delta_a_TD, delta_b_TD)
    return total, rms_norm(total, weight_D, eps)


def rms_norm_to_fp8(x_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed rows in float8 [T, D], their scales [T, 1] fp32)."""
    return rows_to_fp8(rms_norm(x_TD, weight_D, eps))


def add_rms_norm_to_fp8(
    x_TD: Tensor, delta_a_TD: Tensor, delta_b_TD: Tensor | None, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(sum in the dtype of x, normed sum in float8, its scales [T, 1] fp32)."""
    total = add_deltas(x_TD, delta_a_TD, delta_b_TD)
    return total, *rms_norm_to_fp8(total, weight_D, eps)
