"""What pictures need: resizing, patches, attention inside crops, crops joined, features of coordinates."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

# ---------------------------------------------------------------------- resizing
# Weighted sums of neighbouring bytes along one axis, rounded to bytes: one pass of a resizer.
#
#     out[a, o, b] = round_half_up(Σ_k weights[o, k] · image[a, first[o] + k, b]), limited to 0 … 255
#
# Sums are float64. Weights that are multiples of 2**-22 make them exact, so that their order does not matter. Taps past
# the end of the axis have weight 0.


def resample(image_AIB: Tensor, first_O: Tensor, weights_OK: Tensor) -> Tensor:
    """[A, O, B] uint8 of [A, I, B] uint8; `first_O` int64, `weights_OK` float64."""
    assert image_AIB.dtype == torch.uint8
    taps_OK = first_O[:, None] + torch.arange(weights_OK.shape[1], device=first_O.device)
    taken_AOKB = image_AIB[:, taps_OK.clamp(max=image_AIB.shape[1] - 1)].to(torch.float64)
    sums_AOB = (taken_AOKB * weights_OK[None, :, :, None]).sum(2)
    return (sums_AOB + 0.5).clamp(0, 255).to(torch.uint8)


# ---------------------------------------------------------------------- patches
# Overlapping square windows of a picture as rows of normalised patches.
#
# Window (i, j) begins at pixel (i · step, j · step) and is `window` pixels wide. Its patches go row by row; inside a
# patch the order is channel, row, column. A byte v becomes (v / 255 - 0.5) / 0.5, in fp32, and is rounded to `dtype`.
# Zeros fill a patch up to a multiple of `ALIGNMENT` numbers.


ALIGNMENT = 8
"""A matrix product over a number of columns that is no multiple of this falls to a slow kernel."""


def num_columns(patch: int) -> int:
    """Of a patch, with the zeros behind it."""
    return -(-3 * patch * patch // ALIGNMENT) * ALIGNMENT


def patchify(
    picture_HWC: Tensor, grid_hw: tuple[int, int], step: int, window: int, patch: int, dtype: torch.dtype
) -> Tensor:
    """[windows, patches per window, num_columns(patch)]."""
    rows, cols = grid_hw
    assert picture_HWC.shape == ((rows - 1) * step + window, (cols - 1) * step + window, 3)
    windows_ijCHW = picture_HWC.unfold(0, window, step).unfold(1, window, step)
    split = windows_ijCHW.unflatten(4, (-1, patch)).unflatten(3, (-1, patch))  # i j C rows patch cols patch
    patches = split.permute(0, 1, 3, 5, 2, 4, 6).flatten(4).flatten(2, 3).flatten(0, 1)
    scaled = patches.to(torch.float32).div_(255).sub_(0.5).div_(0.5).to(dtype)
    return functional.pad(scaled, (0, num_columns(patch) - scaled.shape[-1]))


# ---------------------------------------------------------------------- attention
# Attention inside each crop of a picture: every position sees every other of its own crop.
#
#     out_h = softmax(q_h · k_hᵀ / sqrt(head_dim)) · v_h
#
# A row of `qkv_NPC` is [q heads | k heads | v heads], C = 3 · D, D = heads · head_dim.


def attend_crops(qkv_NPC: Tensor, n_heads: int) -> Tensor:
    """[N, P, D], heads side by side, ready for the output projection."""
    assert qkv_NPC.ndim == 3
    q, k, v = qkv_NPC.unflatten(2, (3, n_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


# ---------------------------------------------------------------------- crops of one picture
# What the projector reads: for each cell of the grid its features in crop 0, which shows the whole picture, and behind
# them those of the tiles there. Tiles overlap. They are stitched to one map without their margins, wherever a neighbour
# lies, and the map is averaged back to the grid.


def join_crops(features_NPD: Tensor, tiles_hw: tuple[int, int], margin: int) -> Tensor:
    """[P, 2 · D] from the features of crop 0 and then the tiles, row by row.

    With one tile it shows the same pixels as crop 0, so crop 0 alone will do.
    """
    num_tiles, grid = tiles_hw[0] * tiles_hw[1], math.isqrt(features_NPD.shape[1])
    if num_tiles == 1 and features_NPD.shape[0] == 1:
        return torch.cat([features_NPD[0], features_NPD[0]], dim=1)
    assert features_NPD.shape[0] == 1 + num_tiles, "one global crop and every tile, no more and no less"
    stitched_HWD = stitch(features_NPD[1:].unflatten(1, (grid, grid)), tiles_hw, margin)
    return torch.cat([features_NPD[0], average_to_grid(stitched_HWD, grid)], dim=1)


def stitch(local_NGGD: Tensor, tiles_hw: tuple[int, int], margin: int) -> Tensor:
    """One map [H, W, D] from overlapping tiles, row by row; the margin is cut wherever a neighbour lies."""
    tiles_h, tiles_w = tiles_hw
    assert local_NGGD.ndim == 4
    assert local_NGGD.shape[0] == tiles_h * tiles_w
    grid = local_NGGD.shape[1]

    def kept(index: int, count: int) -> slice:
        return slice(margin if index > 0 else 0, grid - margin if index < count - 1 else grid)

    rows = []
    for i in range(tiles_h):
        tiles = [local_NGGD[i * tiles_w + j, kept(i, tiles_h), kept(j, tiles_w)] for j in range(tiles_w)]
        rows.append(torch.cat(tiles, dim=1))
    return torch.cat(rows, dim=0)


def average_to_grid(features_HWD: Tensor, grid: int) -> Tensor:
    """One row per grid cell: [grid², D]."""
    pooled = functional.adaptive_avg_pool2d(features_HWD.permute(2, 0, 1), grid)
    return pooled.flatten(1).transpose(0, 1)


# ---------------------------------------------------------------------- coordinates
# Fourier features of coordinates and sizes.
#
#     angle = 2π · Σ_c v_c · F_cf
#     out   = [cos(angle) | sin(angle)]
#
# Everything is fp32: at the learned frequencies half precision would blur neighbouring bins.


def fourier_features(values_NC: Tensor, frequencies_CF: Tensor) -> Tensor:
    """[N, 2·F] fp32, cosines first."""
    assert values_NC.ndim == 2
    assert values_NC.shape[1] == frequencies_CF.shape[0]
    # A sum of products rather than a matmul: TF32 must not touch the angles.
    angles = ((2.0 * math.pi) * values_NC.float()[:, :, None] * frequencies_CF.float()).sum(dim=1)
    return torch.cat([angles.cos(), angles.sin()], dim=1)
