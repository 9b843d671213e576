"""What happens to queries, keys and values between the fused projection and attention."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kestrel.kernels.norms import rms_norm
from kestrel.kernels.paged_attention import write_kv
from kestrel.kernels.rope_scaling import RopeScaling

# ---------------------------------------------------------------------- rotation
# Rotary position embedding over the first dimensions of each head.
#
#     inv_freq_j = theta^(-2j / rotary_dim),  j = 0 … R-1,  R = rotary_dim / 2
#     angle      = position · inv_freq_j
#     r' = r·cos(angle) - i·sin(angle)      (r, i) = (x[j], x[R + j])
#     i' = r·sin(angle) + i·cos(angle)
#
# Pairs are half-split and written back in place of their halves; dimensions from `rotary_dim` on pass through.
# Tables and products are fp32; the result has the dtype of the input. What enters a table is rounded to fp32 where the
# reference rounds it, but powers, sines and cosines are computed in fp64: in fp32 each processor has its own last bits,
# and at a position of a thousand they are a thousand times as large.


def rope_tables(
    num_positions: int,
    rotary_dim: int,
    theta: float,
    device: torch.device | str,
    scaling: RopeScaling | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin for positions 0 … num_positions-1, each [num_positions, rotary_dim / 2], fp32."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    powers = (theta ** exponents.double()).float()
    inv_freq = 1.0 / powers if scaling is None else scaling.frequencies(theta, powers)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32, device=device), inv_freq)
    cos, sin = angles.double().cos().float(), angles.double().sin().float()
    return (cos, sin) if scaling is None else (cos * scaling.magnitude, sin * scaling.magnitude)


def apply_rope(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotates x by the table rows of its positions. 2·R ≤ D."""
    assert x_THD.ndim == 3
    assert cos_TR.shape == sin_TR.shape == (x_THD.shape[0], cos_TR.shape[1])
    half = cos_TR.shape[1]
    real, imag, rest = x_THD.split_with_sizes([half, half, x_THD.shape[2] - 2 * half], dim=2)
    cos, sin = cos_TR[:, None], sin_TR[:, None]
    rotated = [real * cos - imag * sin, real * sin + imag * cos]
    return torch.cat([*(part.to(x_THD.dtype) for part in rotated), rest], dim=2)


# ---------------------------------------------------------------------- tau
# Per-head scales of queries and values that depend on content and position.
#
#     f      = GELU_erf(qkv)                                qkv: fused projection, bias included, not yet rotated
#     p_h    = 0.5 + sigmoid(alpha_h · ln(position + 1))
#     tau_q  = tanh(wq_h · f) + p_h
#     tau_v  = tanh(wv_h · f) + p_h
#
# The two projections run in the dtype of `qkv_TF`; the rest, and the results, are fp32.


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
    """`tau_factors` with the two matrices one above the other."""
    wq_HF, wv_HF = w_2HF.chunk(2)
    return tau_factors(qkv_TF, wq_HF, wv_HF, alpha_H, positions_T)


def scale_heads(x_THD: Tensor, factors_TH: Tensor) -> Tensor:
    """x times one fp32 factor per token and head, product in fp32, back in the dtype of x."""
    return (x_THD * factors_TH[:, :, None]).to(x_THD.dtype)


# ---------------------------------------------------------------------- all of it in one operation
# A row of `qkv_TF` is [q heads | k heads | v heads]. Queries and values are scaled per head where factors are given,
# queries and keys are normalised per head where weights are given and rotated by their positions, keys and values go to
# their slots of the cache, queries come back. Every step rounds to the dtype of `qkv_TF`.
#
# Caches of float8 receive k / k_scale and v / v_scale, limited to what the type can hold.


def rotate_and_store(
    qkv_TF: Tensor,
    n_heads: int,
    n_kv_heads: int,
    cos_table: Tensor | None,
    sin_table: Tensor | None,
    positions_T: Tensor,
    slots_T: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tau: tuple[Tensor, Tensor] | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """q [T, heads, head_dim], contiguous. Tables: [num_positions, rotary_dim / 2], fp32; without them nothing is
    rotated. `tau`: factors [T, heads] of queries and [T, kv_heads] of values, fp32. `norms`: weights [head_dim] of an
    RMS norm of each query and key before the rotation, and its eps."""
    assert qkv_TF.ndim == 2
    heads = qkv_TF.unflatten(1, (n_heads + 2 * n_kv_heads, -1))
    q_THD, k_THD, v_THD = heads.split([n_heads, n_kv_heads, n_kv_heads], dim=1)
    if tau is not None:
        q_THD, v_THD = scale_heads(q_THD, tau[0]), scale_heads(v_THD, tau[1])
    if norms is not None:
        q_weight_D, k_weight_D, eps = norms
        q_THD, k_THD = rms_norm(q_THD, q_weight_D, eps), rms_norm(k_THD, k_weight_D, eps)
    if cos_table is not None and sin_table is not None:
        cos_TR, sin_TR = cos_table[positions_T], sin_table[positions_T]
        q_THD, k_THD = apply_rope(q_THD, cos_TR, sin_TR), apply_rope(k_THD, cos_TR, sin_TR)
    write_kv(k_cache, v_cache, slots_T, k_THD, v_THD, k_scale, v_scale)
    return q_THD.contiguous()
