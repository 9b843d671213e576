"""Rotary position embedding over the first dimensions of each head.

    inv_freq_j = theta^(-2j / rotary_dim),  j = 0 … R-1,  R = rotary_dim / 2
    angle      = position · inv_freq_j
    r' = r·cos(angle) - i·sin(angle)      (r, i) = (x[j], x[R + j])
    i' = r·sin(angle) + i·cos(angle)

Pairs are half-split and written back in place of their halves; dimensions from `rotary_dim` on pass through.
Tables and products are fp32; the result has the dtype of the input. What enters a table is rounded to fp32 where the
reference rounds it, but powers, sines and cosines are computed in fp64: in fp32 each processor has its own last bits,
and at a position of a thousand they are a thousand times as large.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope_tables(num_positions: int, rotary_dim: int, theta: float, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """cos and sin for positions 0 … num_positions-1, each [num_positions, rotary_dim / 2], fp32."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    inv_freq = 1.0 / (theta ** exponents.double()).float()
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32, device=device), inv_freq)
    return angles.double().cos().float(), angles.double().sin().float()


def apply_rope(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotates x by the table rows of its positions. 2·R ≤ D."""
    assert x_THD.ndim == 3
    assert cos_TR.shape == sin_TR.shape == (x_THD.shape[0], cos_TR.shape[1])
    half = cos_TR.shape[1]
    real, imag, rest = x_THD.split([half, half, x_THD.shape[2] - 2 * half], dim=2)
    cos, sin = cos_TR[:, None], sin_TR[:, None]
    rotated = torch.cat([real * cos - imag * sin, real * sin + imag * cos], dim=2)
    return torch.cat([rotated.to(x_THD.dtype), rest], dim=2)
