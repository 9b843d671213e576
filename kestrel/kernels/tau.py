"""Per-head scales of queries and values that depend on content and position.

    f      = GELU_erf(qkv)                                qkv: fused projection, bias included, not yet rotated
    p_h    = 0.5 + sigmoid(alpha_h · ln(position + 1))
    tau_q  = tanh(wq_h · f) + p_h
    tau_v  = tanh(wv_h · f) + p_h

The two projections run in the dtype of `qkv_TF`; the rest, and the results, are fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def tau_position(alpha_H: Tensor, positions_T: Tensor) -> Tensor:
    """p_h for every position: [T, H], fp32."""
    return 0.5 + torch.sigmoid(torch.log(positions_T.float() + 1.0)[:, None] * alpha_H.float())


def tau_factors(
    qkv_TF: Tensor, wq_HF: Tensor, wv_HF: Tensor, alpha_H: Tensor, positions_T: Tensor
) -> tuple[Tensor, Tensor]:
    """(tau_q, tau_v), each [T, H], fp32."""
    assert qkv_TF.ndim == 2
    assert positions_T.shape == qkv_TF.shape[:1]
    features = functional.gelu(qkv_TF)
    by_position = tau_position(alpha_H, positions_T)
    tau_q = torch.tanh(functional.linear(features, wq_HF).float()) + by_position
    tau_v = torch.tanh(functional.linear(features, wv_HF).float()) + by_position
    return tau_q, tau_v


def stacked_tau_factors(qkv_TF: Tensor, w_2HF: Tensor, alpha_H: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
    """The same from one matrix, cat(wq, wv)."""
    wq_HF, wv_HF = w_2HF.chunk(2)
    return tau_factors(qkv_TF, wq_HF, wv_HF, alpha_H, positions_T)


def scale_heads(x_THD: Tensor, factors_TH: Tensor) -> Tensor:
    """x times one fp32 factor per token and head, product in fp32, back in the dtype of x."""
    return (x_THD * factors_TH[:, :, None]).to(x_THD.dtype)
