"""Resizing, patches, attention inside crops, crops joined."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false
from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel.kernels.ops import Op
from kestrel.kernels.triton.launch import HOPPER, fault_of
from kestrel.kernels.vision import attend_crops as attend_crops_in_torch
from kestrel.kernels.vision import num_columns

# ---------------------------------------------------------------------- resizing
# One pass of a resizer: a lane per result, its few taps one after another.


BLOCK = 512


@triton.jit(do_not_specialize=["num_results", "num_in", "num_out", "inner", "taps"])
def _resample(
    image_ptr, first_ptr, weights_ptr, out_ptr, num_results, num_in, num_out, inner, taps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = n < num_results
    b, o, a = n % inner, n // inner % num_out, n // inner // num_out
    first = tl.load(first_ptr + o, mask=inside, other=0)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for k in range(taps):
        place = first + k
        value = tl.load(image_ptr + (a * num_in + place) * inner + b, mask=inside & (place < num_in), other=0)
        total += value.to(tl.float64) * tl.load(weights_ptr + o * taps + k, mask=inside, other=0.0)
    limited = tl.minimum(tl.maximum(total + 0.5, 0.0), 255.0)
    tl.store(out_ptr + n, limited.to(tl.int32).to(tl.uint8), mask=inside)


def resample(image_AIB: Tensor, first_O: Tensor, weights_OK: Tensor) -> Tensor:
    """[A, O, B] uint8 of [A, I, B] uint8; `first_O` int64, `weights_OK` float64."""
    outer, num_in, inner = image_AIB.shape
    num_out, taps = weights_OK.shape
    assert image_AIB.dtype == torch.uint8
    assert weights_OK.dtype == torch.float64
    for tensor in (image_AIB, first_O, weights_OK):
        assert tensor.is_contiguous()
    out_AOB = torch.empty(outer, num_out, inner, dtype=torch.uint8, device=image_AIB.device)
    if out_AOB.numel() > 0:
        _resample[(triton.cdiv(out_AOB.numel(), BLOCK),)](
            image_AIB, first_O, weights_OK, out_AOB, out_AOB.numel(), num_in, num_out, inner, taps, BLOCK=BLOCK
        )
    return out_AOB


# ---------------------------------------------------------------------- patches
# Windows of a picture as normalised patches in one pass: a program per patch.


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


# ---------------------------------------------------------------------- attention inside crops
# Attention inside each crop, reading the fused projection where it lies.
#
# A program takes a block of queries of one head of one crop and walks over the crop's keys. A head is held as two
# tiles, the largest power of two in it and what is left (72 = 64 + 8, the rest padded to 16), instead of one padded to
# 128. All key blocks but the last are full and need no mask; the last one is as small as its keys allow (729 = 11 · 64
# + 25: 32).


@dataclass(frozen=True, slots=True)
class CropTuning:
    block_queries: int = 128
    block_keys: int = 64
    num_warps: int = 4
    num_stages: int = 3


@triton.jit
def _head_tiles(
    ptr, rows, num_rows, row_stride, HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    ROWS_MASKED: tl.constexpr,
):  # fmt: skip
    """A head of some rows as (main tile, rest tile). Without a rest the second is part of the first and not used."""
    d = tl.arange(0, MAIN)
    place = ptr + rows[:, None] * row_stride
    if ROWS_MASKED:
        main = tl.load(place + d[None, :], mask=(rows < num_rows)[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    elif MAIN > HEAD_DIM:
        main = tl.load(place + d[None, :], mask=(d < HEAD_DIM)[None, :], other=0.0)
    else:
        main = tl.load(place + d[None, :])
    rest = main
    if REST > 0:
        r = MAIN + tl.arange(0, REST)
        if ROWS_MASKED:
            rest = tl.load(place + r[None, :], mask=(rows < num_rows)[:, None] & (r < HEAD_DIM)[None, :], other=0.0)
        elif MAIN + REST > HEAD_DIM:
            rest = tl.load(place + r[None, :], mask=(r < HEAD_DIM)[None, :], other=0.0)
        else:
            rest = tl.load(place + r[None, :])
    return main, rest


@triton.jit
def _attend_block(
    q, q_rest, k_ptr, v_ptr, top, weight, out, out_rest, first, num_rows, row_stride, score_scale,
    BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block of keys added to running softmaxes; scores to the base 2."""
    rows = first + tl.arange(0, BLOCK)
    k, k_rest = _head_tiles(k_ptr, rows, num_rows, row_stride, HEAD_DIM, MAIN, REST, MASKED)
    score = tl.dot(q, tl.trans(k), input_precision="ieee")
    if REST > 0:
        score = tl.dot(q_rest, tl.trans(k_rest), score, input_precision="ieee")
    if MASKED:
        score = tl.where((rows < num_rows)[None, :], score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, axis=1) * score_scale)
    p = tl.exp2(score * score_scale - new_top[:, None])
    kept = tl.exp2(top - new_top)
    weight = weight * kept + tl.sum(p, axis=1)
    v, v_rest = _head_tiles(v_ptr, rows, num_rows, row_stride, HEAD_DIM, MAIN, REST, MASKED)
    p = p.to(v.dtype)
    out = tl.dot(p, v, out * kept[:, None], input_precision="ieee")
    if REST > 0:
        out_rest = tl.dot(p, v_rest, out_rest * kept[:, None], input_precision="ieee")
    return new_top, weight, out, out_rest


@triton.jit
def _attend_crops(
    qkv_ptr, out_ptr, num_rows, row_stride, score_scale,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, REST_TILE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, LAST_BLOCK: tl.constexpr,
):  # fmt: skip
    head, crop = tl.program_id(1), tl.program_id(2).to(tl.int64)
    q_rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q_ptr = qkv_ptr + crop * num_rows * row_stride + head * HEAD_DIM
    k_ptr, v_ptr = q_ptr + HEADS * HEAD_DIM, q_ptr + 2 * HEADS * HEAD_DIM
    q, q_rest = _head_tiles(q_ptr, q_rows, num_rows, row_stride, HEAD_DIM, MAIN, REST, True)
    top = tl.full((BLOCK_Q,), -1.0e30, dtype=tl.float32)
    weight = tl.zeros((BLOCK_Q,), dtype=tl.float32)
    out = tl.zeros((BLOCK_Q, MAIN), dtype=tl.float32)
    out_rest = tl.zeros((BLOCK_Q, REST_TILE), dtype=tl.float32)
    full = num_rows // BLOCK_K * BLOCK_K
    for first in range(0, full, BLOCK_K):
        top, weight, out, out_rest = _attend_block(
            q, q_rest, k_ptr, v_ptr, top, weight, out, out_rest, first, num_rows, row_stride, score_scale,
            BLOCK_K, HEAD_DIM, MAIN, REST, False,
        )  # fmt: skip
    if LAST_BLOCK > 0:
        top, weight, out, out_rest = _attend_block(
            q, q_rest, k_ptr, v_ptr, top, weight, out, out_rest, full, num_rows, row_stride, score_scale,
            LAST_BLOCK, HEAD_DIM, MAIN, REST, True,
        )  # fmt: skip
    share = (1.0 / weight)[:, None]
    d = tl.arange(0, MAIN)
    place = out_ptr + (crop * num_rows + q_rows)[:, None] * (HEADS * HEAD_DIM) + head * HEAD_DIM
    inside = (q_rows < num_rows)[:, None]
    tl.store(place + d[None, :], (out * share).to(out_ptr.dtype.element_ty), mask=inside & (d < HEAD_DIM)[None, :])
    if REST > 0:
        r = MAIN + tl.arange(0, REST)
        rest = (out_rest * share).to(out_ptr.dtype.element_ty)
        tl.store(place + r[None, :], rest, mask=inside & (r < HEAD_DIM)[None, :])


def attend_crops(qkv_NPC: Tensor, n_heads: int, tuning: CropTuning | None = None) -> Tensor:
    """[N, P, D], heads side by side, ready for the output projection."""
    num_crops, num_rows, width = qkv_NPC.shape
    head_dim = width // (3 * n_heads)
    assert width == 3 * n_heads * head_dim
    assert qkv_NPC.is_contiguous()
    out_NPD = torch.empty(num_crops, num_rows, n_heads * head_dim, dtype=qkv_NPC.dtype, device=qkv_NPC.device)
    if out_NPD.numel() == 0:
        return out_NPD
    chosen = tuning or CropTuning()
    main, rest = split_head(head_dim)
    left = num_rows % chosen.block_keys
    _attend_crops[(triton.cdiv(num_rows, chosen.block_queries), n_heads, num_crops)](
        qkv_NPC, out_NPD, num_rows, width, math.log2(math.e) / math.sqrt(head_dim),
        HEADS=n_heads, HEAD_DIM=head_dim, MAIN=main, REST=rest, REST_TILE=rest or 16,
        BLOCK_Q=chosen.block_queries, BLOCK_K=chosen.block_keys,
        LAST_BLOCK=max(16, triton.next_power_of_2(left)) if left else 0,
        num_warps=chosen.num_warps, num_stages=chosen.num_stages,
    )  # fmt: skip
    return out_NPD


def split_head(head_dim: int) -> tuple[int, int]:
    """Tile sizes that hold a head, each 0 or a power of two that the tensor cores take (16 and more)."""
    main = max(16, 1 << (head_dim.bit_length() - 1))
    rest = head_dim - main
    return main, max(16, triton.next_power_of_2(rest)) if rest > 0 else 0


# ---------------------------------------------------------------------- crops of one picture
# A program per cell of the grid and a part of the features: it reads the positions whose average the cell is where they
# lie in the tiles.


JOINED_BLOCK = 512


@triton.jit
def _tile_of(place, count, GRID: tl.constexpr, MARGIN: tl.constexpr):
    """(tile, place inside it) of a place on the stitched map, along one axis."""
    step = GRID - 2 * MARGIN
    tile = tl.minimum(tl.maximum(place - MARGIN, 0) // step, count - 1)
    return tile, place - tile * step


@triton.jit(do_not_specialize=["tiles_h", "tiles_w", "first_tile"])
def _join_crops(
    features_ptr, out_ptr, tiles_h, tiles_w, first_tile,
    GRID: tl.constexpr, MARGIN: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    cell = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < DIM
    out_ptr += cell * (2 * DIM) + d
    tl.store(out_ptr, tl.load(features_ptr + cell * DIM + d, mask=inside), mask=inside)
    height, width = (GRID - 2 * MARGIN) * tiles_h + 2 * MARGIN, (GRID - 2 * MARGIN) * tiles_w + 2 * MARGIN
    i, j = cell // GRID, cell % GRID
    first_y, end_y = i * height // GRID, ((i + 1) * height + GRID - 1) // GRID
    first_x, end_x = j * width // GRID, ((j + 1) * width + GRID - 1) // GRID
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for y in range(first_y, end_y):
        tile_y, local_y = _tile_of(y, tiles_h, GRID, MARGIN)
        for x in range(first_x, end_x):
            tile_x, local_x = _tile_of(x, tiles_w, GRID, MARGIN)
            row = ((first_tile + tile_y * tiles_w + tile_x) * GRID + local_y) * GRID + local_x
            total += tl.load(features_ptr + row.to(tl.int64) * DIM + d, mask=inside, other=0.0)
    mean = total / ((end_y - first_y) * (end_x - first_x))
    tl.store(out_ptr + DIM, mean.to(out_ptr.dtype.element_ty), mask=inside)


def join_crops(features_NPD: Tensor, tiles_hw: tuple[int, int], margin: int) -> Tensor:
    """[P, 2 · D] from the features of crop 0 and then the tiles, row by row."""
    num_crops, num_cells, dim = features_NPD.shape
    num_tiles, grid = tiles_hw[0] * tiles_hw[1], math.isqrt(num_cells)
    first_tile = 0 if num_tiles == num_crops == 1 else 1
    assert num_crops == first_tile + num_tiles, "one global crop and every tile, no more and no less"
    assert features_NPD.is_contiguous()
    out_PJ = torch.empty(num_cells, 2 * dim, dtype=features_NPD.dtype, device=features_NPD.device)
    _join_crops[(num_cells, triton.cdiv(dim, JOINED_BLOCK))](
        features_NPD, out_PJ, *tiles_hw, first_tile, GRID=grid, MARGIN=margin, DIM=dim, BLOCK=JOINED_BLOCK
    )
    return out_PJ


# ---------------------------------------------------------------------- which attention runs
# Which attention inside crops is the fastest that runs here: the Hopper kernel where it does, torch's elsewhere.


logger = logging.getLogger("kestrel.kernels")

DEVICE = "cuda"
HEADS = 16


def fastest_attend_crops(capability: tuple[int, int]) -> Op:
    if capability[0] != HOPPER:
        return attend_crops_in_torch
    fault = _why_not_hopper()
    if fault is None:
        return attend_crops_on_hopper
    logger.warning("attention of crops runs in torch, without the Hopper kernel: %s", fault)
    return attend_crops_in_torch


def attend_crops_on_hopper(qkv_NPC: Tensor, n_heads: int) -> Tensor:
    """By the Hopper kernel if it takes these sizes."""
    # Here and not above: other GPUs, and Triton before 3.6, have no use for the module.
    from kestrel.kernels.triton import hopper_crop_attention as hopper  # noqa: PLC0415

    run = hopper.attend_crops if hopper.fits(qkv_NPC, n_heads) else attend_crops_in_torch
    return run(qkv_NPC, n_heads)


def _why_not_hopper() -> str | None:
    """Several tiles a program."""
    qkv_NPC = torch.randn(12, 300, 3 * HEADS * 72, device=DEVICE, dtype=torch.bfloat16)
    return fault_of(
        lambda: attend_crops_on_hopper(qkv_NPC, HEADS), lambda: attend_crops_in_torch(qkv_NPC.float(), HEADS)
    )
