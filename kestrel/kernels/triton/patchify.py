"""Windows of a picture as normalised patches in one pass: a program per patch."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel.kernels.patchify import num_columns


@triton.jit(do_not_specialize=["width", "cols"])
def _patchify(
    picture_ptr, out_ptr, width, cols,
    STEP: tl.constexpr, GRID: tl.constexpr, PATCH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    position, one_window = tl.program_id(0), tl.program_id(1)
    number = tl.arange(0, BLOCK)
    channel, in_patch = number // (PATCH * PATCH), number % (PATCH * PATCH)
    y = one_window // cols * STEP + position // GRID * PATCH + in_patch // PATCH
    x = one_window % cols * STEP + position % GRID * PATCH + in_patch % PATCH
    inside = number < 3 * PATCH * PATCH
    value = tl.load(picture_ptr + (y.to(tl.int64) * width + x) * 3 + channel, mask=inside, other=0).to(tl.float32)
    scaled = tl.div_rn(tl.div_rn(value, 255.0 + tl.zeros_like(value)) - 0.5, 0.5 + tl.zeros_like(value))
    row = one_window.to(tl.int64) * (GRID * GRID) + position
    filled = tl.where(inside, scaled, 0.0)
    tl.store(out_ptr + row * COLUMNS + number, filled.to(out_ptr.dtype.element_ty), mask=number < COLUMNS)


def patchify(
    picture_HWC: Tensor, grid_hw: tuple[int, int], step: int, window: int, patch: int, dtype: torch.dtype
) -> Tensor:
    """[windows, patches per window, num_columns(patch)]."""
    rows, cols = grid_hw
    assert picture_HWC.shape == ((rows - 1) * step + window, (cols - 1) * step + window, 3)
    assert picture_HWC.is_contiguous()
    assert window % patch == 0
    grid, width = window // patch, num_columns(patch)
    out = torch.empty(rows * cols, grid * grid, width, dtype=dtype, device=picture_HWC.device)
    _patchify[(grid * grid, rows * cols)](
        picture_HWC, out, picture_HWC.shape[1], cols,
        STEP=step, GRID=grid, PATCH=patch, COLUMNS=width, BLOCK=triton.next_power_of_2(width),
    )  # fmt: skip
    return out
