"""Linear layers with what often follows them: activation, residual, gate."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kestrel.kernels.fp8 import rows_to_fp8
from kestrel.kernels.norms import rms_norm

# ---------------------------------------------------------------------- a handful of rows
# A linear layer for a handful of rows, with what often follows it.
#
#     y = norm(x) · (scale · weight)ᵀ + bias;  y = GELU_tanh(y);  y += residual
#
# With `gelu_rows_M` (bool) only these rows get the GELU, for the others something else comes first. `scale_F` holds a
# factor per output for weights kept in float8. `norm` is an RMS norm's weight and eps; fused, x is not rounded between
# norm and product. `gated_linear` is the same for the first matrix of a gated MLP, with the gate behind it.


def small_linear(
    x_MD: Tensor,
    weight_FD: Tensor,
    bias_F: Tensor | None = None,
    residual_MF: Tensor | None = None,
    has_gelu: bool = False,
    scale_F: Tensor | None = None,
    gelu_rows_M: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    is_beside: bool = False,
) -> Tensor:
    """y [M, F] in the dtype of x. `is_beside`: other operations run at the same time; nothing here."""
    assert x_MD.ndim == weight_FD.ndim == 2
    assert weight_FD.stride(1) == 1
    if norm is not None:
        x_MD = rms_norm(x_MD, *norm)
    if scale_F is not None:
        weight_FD = (weight_FD.float() * scale_F[:, None]).to(x_MD.dtype)
    y_MF = functional.linear(x_MD, weight_FD, bias_F)
    if has_gelu:
        active_MF = functional.gelu(y_MF, approximate="tanh")
        y_MF = active_MF if gelu_rows_M is None else torch.where(gelu_rows_M[:, None], active_MF, y_MF)
    return y_MF if residual_MF is None else y_MF + residual_MF


def gated_linear(
    x_MD: Tensor, weight_FD: Tensor, scale_F: Tensor | None = None, norm: tuple[Tensor, float] | None = None
) -> Tensor:
    """hidden [M, F / 2] in the dtype of x."""
    return silu_gate(small_linear(x_MD, weight_FD, scale_F=scale_F, norm=norm))


# ---------------------------------------------------------------------- many rows
# A linear layer; one whose result is added to what is there; one with the tanh form of GELU behind it, which feeds the
# second matrix of an MLP.


def linear(x: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """x · weightᵀ + bias, [..., F]."""
    return functional.linear(x, weight_FD, bias_F)


def add_linear(sum_TF: Tensor, x_TD: Tensor, weight_FD: Tensor) -> Tensor:
    """sum += x · weightᵀ, in place."""
    return sum_TF.addmm_(x_TD, weight_FD.T)


def gelu_linear(x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor) -> Tensor:
    """GELU_tanh(x · weightᵀ + bias), [T, F]."""
    assert x_TD.ndim == 2
    return functional.gelu(functional.linear(x_TD, weight_FD, bias_F), approximate="tanh")


def gelu_linear_epilogue(x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor) -> Tensor:
    """The same on a GPU, whose matrix product ends with the activation. On a CPU this call means the erf form."""
    assert x_TD.is_cuda
    return torch.ops.aten._addmm_activation(bias_F, x_TD, weight_FD.t(), use_gelu=True)


# ---------------------------------------------------------------------- gated SiLU
# The middle of a gated MLP: one product has made [gate | up] of each row.
#
#     hidden = silu(gate) · up        silu(g) = g · sigmoid(g)
#
# silu(gate) is rounded to the dtype of z before it is multiplied, as the published models do.


def silu_gate(z_TF: Tensor) -> Tensor:
    """hidden [T, F / 2]."""
    gate_TI, up_TI = z_TF.chunk(2, dim=-1)
    return functional.silu(gate_TI) * up_TI


def silu_gate_to_fp8(z_TF: Tensor) -> tuple[Tensor, Tensor]:
    """(hidden in float8 [T, F / 2], its scales [T, 1] fp32)."""
    return rows_to_fp8(silu_gate(z_TF))
