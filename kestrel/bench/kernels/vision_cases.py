"""What the vision tower needs: norms, attention inside crops, rows for float8 products from either and from GELUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kestrel.bench.kernels.case import Case, Maker, Sizes
from kestrel.bench.kernels.tunings import crop_attention_tunings, fp8_tunings, layer_norm_tunings
from kestrel.kernels import fp8, norms, vision
from kestrel.kernels.triton import fp8 as triton_fp8_rows
from kestrel.kernels.triton import norms as triton_layer_norm
from kestrel.kernels.triton import vision as triton_crop_attention
from kestrel.kernels.triton.vision import HOPPER, attend_crops_on_hopper

EPS = 1e-5
HALF_BYTES = 2
FP8_BYTES = 1


def vision_cases(sizes: Sizes) -> Iterator[Case]:
    vision = sizes.vision
    for crops in sizes.crops:
        rows = crops * vision.num_patches
        yield norm_case(rows, vision.enc_dim)
        yield add_norm_case(rows, vision.enc_dim, num_deltas=1)
        yield _attention_case(crops, vision.num_patches, vision.enc_n_heads, vision.enc_dim)
        yield _fp8_case(rows, vision.enc_dim)
        yield _fp8_case(rows, vision.enc_ff_dim)
        yield norm_to_fp8_case(rows, vision.enc_dim)
        yield add_norm_to_fp8_case(rows, vision.enc_dim, num_deltas=1)
        yield gelu_to_fp8_case(rows, vision.enc_ff_dim)


def norm_case(rows: int, dim: int) -> Case:
    def make(maker: Maker) -> tuple[Tensor, Tensor, Tensor, float]:
        return maker.numbers(rows, dim), maker.numbers(dim), maker.numbers(dim), EPS

    return Case(
        op="layer_norm",
        size=f"{rows}x{dim}",
        plain=norms.layer_norm,
        triton=triton_layer_norm.layer_norm,
        make=make,
        bytes_moved=2 * rows * dim * HALF_BYTES,
        flop=8 * rows * dim,
        tunings=layer_norm_tunings(),
    )


def add_norm_case(rows: int, dim: int, num_deltas: int) -> Case:
    def make(maker: Maker) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, float]:
        x, a = maker.numbers(rows, dim), maker.numbers(rows, dim)
        b = maker.numbers(rows, dim) if num_deltas == 2 else None
        return x, a, b, maker.numbers(dim), maker.numbers(dim), EPS

    return Case(
        op="add_layer_norm",
        size=f"{rows}x{dim} +{num_deltas}",
        plain=norms.add_layer_norm,
        triton=triton_layer_norm.add_layer_norm,
        make=make,
        bytes_moved=(3 + num_deltas) * rows * dim * HALF_BYTES,
        flop=9 * rows * dim,
        tunings=layer_norm_tunings(),
    )


def _attention_case(crops: int, positions: int, heads: int, dim: int) -> Case:
    def make(maker: Maker) -> tuple[Tensor, int]:
        return maker.numbers(crops, positions, 3 * dim), heads

    return Case(
        op="attend_crops",
        size=f"{crops} crops of {positions}, {heads}x{dim // heads}",
        plain=vision.attend_crops,
        triton=_attend_crops,
        make=make,
        bytes_moved=4 * crops * positions * dim * HALF_BYTES,
        flop=4 * crops * positions**2 * dim,
        tunings=crop_attention_tunings(),
    )


def _attend_crops(qkv_NPC: Tensor, n_heads: int, tuning: triton_crop_attention.CropTuning | None = None) -> Tensor:
    """What engines run on a Hopper GPU; the portable kernel elsewhere, and where its block sizes are asked for."""
    if tuning is not None or not qkv_NPC.is_cuda or torch.cuda.get_device_capability(qkv_NPC.device)[0] != HOPPER:
        return triton_crop_attention.attend_crops(qkv_NPC, n_heads, tuning)
    return attend_crops_on_hopper(qkv_NPC, n_heads)


def _fp8_case(rows: int, dim: int) -> Case:
    def make(maker: Maker) -> tuple[Tensor]:
        return (maker.numbers(rows, dim),)

    return Case(
        op="rows_to_fp8",
        size=f"{rows}x{dim}",
        plain=fp8.rows_to_fp8,
        triton=triton_fp8_rows.rows_to_fp8,
        make=make,
        bytes_moved=rows * dim * (HALF_BYTES + FP8_BYTES),
        flop=3 * rows * dim,
        tunings=fp8_tunings(),
        gives_fp8=True,
    )


def norm_to_fp8_case(rows: int, dim: int) -> Case:
    return replace(
        norm_case(rows, dim),
        op="layer_norm_to_fp8",
        plain=norms.layer_norm_to_fp8,
        triton=triton_layer_norm.layer_norm_to_fp8,
        bytes_moved=rows * dim * (HALF_BYTES + FP8_BYTES),
        flop=11 * rows * dim,
        gives_fp8=True,
    )


def add_norm_to_fp8_case(rows: int, dim: int, num_deltas: int) -> Case:
    return replace(
        add_norm_case(rows, dim, num_deltas),
        op="add_layer_norm_to_fp8",
        plain=norms.add_layer_norm_to_fp8,
        triton=triton_layer_norm.add_layer_norm_to_fp8,
        bytes_moved=rows * dim * ((2 + num_deltas) * HALF_BYTES + FP8_BYTES),
        flop=12 * rows * dim,
        gives_fp8=True,
    )


def gelu_to_fp8_case(rows: int, dim: int) -> Case:
    return replace(
        _fp8_case(rows, dim),
        op="gelu_to_fp8",
        plain=fp8.gelu_to_fp8,
        triton=triton_fp8_rows.gelu_to_fp8,
        flop=11 * rows * dim,
    )
