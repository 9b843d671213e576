"""Fourier features of coordinates and sizes.

    angle = 2π · Σ_c v_c · F_cf
    out   = [cos(angle) | sin(angle)]

Everything is fp32: at the learned frequencies half precision would blur neighbouring bins.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def fourier_features(values_NC: Tensor, frequencies_CF: Tensor) -> Tensor:
    """[N, 2·F] fp32, cosines first."""
    assert values_NC.ndim == 2
    assert values_NC.shape[1] == frequencies_CF.shape[0]
    # A sum of products rather than a matmul: TF32 must not touch the angles.
    angles = ((2.0 * math.pi) * values_NC.float()[:, :, None] * frequencies_CF.float()).sum(dim=1)
    return torch.cat([angles.cos(), angles.sin()], dim=1)
