"""Overlapping square windows of a picture as rows of normalised patches.

Window (i, j) begins at pixel (i · step, j · step) and is `window` pixels wide. Its patches go row by row; inside a
patch the order is channel, row, column. A byte v becomes (v / 255 - 0.5) / 0.5, in fp32, and is rounded to `dtype`.
Zeros fill a patch up to a multiple of `ALIGNMENT` numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

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
