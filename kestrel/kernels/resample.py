"""Weighted sums of neighbouring bytes along one axis, rounded to bytes: one pass of a resizer.

    out[a, o, b] = round_half_up(Σ_k weights[o, k] · image[a, first[o] + k, b]), limited to 0 … 255

Sums are float64. Weights that are multiples of 2**-22 make them exact, so that their order does not matter. Taps past
the end of the axis have weight 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def resample(image_AIB: Tensor, first_O: Tensor, weights_OK: Tensor) -> Tensor:
    """[A, O, B] uint8 of [A, I, B] uint8; `first_O` int64, `weights_OK` float64."""
    assert image_AIB.dtype == torch.uint8
    taps_OK = first_O[:, None] + torch.arange(weights_OK.shape[1], device=first_O.device)
    taken_AOKB = image_AIB[:, taps_OK.clamp(max=image_AIB.shape[1] - 1)].to(torch.float64)
    sums_AOB = (taken_AOKB * weights_OK[None, :, :, None]).sum(2)
    return (sums_AOB + 0.5).clamp(0, 255).to(torch.uint8)
