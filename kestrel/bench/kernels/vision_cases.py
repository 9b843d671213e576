"""What works on rows alone (norms, activations, rows to float8) and what else the vision tower needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kestrel.bench.kernels.case import FP8_BYTES, HALF_BYTES, Case, Maker, Sizes, op_case
from kestrel.bench.kernels.tunings import crop_attention_tunings, norm_tunings, row_tunings
from kestrel.kernels import vision as plain_vision
from kestrel.kernels.triton import vision as triton_vision
from kestrel.kernels.triton.vision import HOPPER, CropTuning, attend_crops_on_hopper

EPS = 1e-5


def vision_cases(sizes: Sizes) -> Iterator[Case]:
    vision = sizes.vision
    for crops in sizes.crops:
        rows = crops * vision.num_patches
        yield norm_case(rows, vision.enc_dim)
        yield norm_case(rows, vision.enc_dim, num_deltas=1)
        yield _attention_case(crops, vision.num_patches, vision.enc_n_heads, vision.enc_dim)
        yield row_case("rows_to_fp8", rows, vision.enc_dim)
        yield row_case("rows_to_fp8", rows, vision.enc_ff_dim)
        yield norm_case(rows, vision.enc_dim, to_fp8=True)
        yield norm_case(rows, vision.enc_dim, num_deltas=1, to_fp8=True)
        yield row_case("gelu_to_fp8", rows, vision.enc_ff_dim)


def norm_case(rows: int, dim: int, num_deltas: int = 0, *, is_rms: bool = False, to_fp8: bool = False) -> Case:
    """Of rows as they are, or of their sum with one delta or two, which is written too."""

    def make(maker: Maker) -> tuple[Any, ...]:
        x, *deltas = (maker.numbers(rows, dim) for _ in range(1 + num_deltas))
        weights = [maker.numbers(dim) for _ in range(1 if is_rms else 2)]
        return x, *deltas, *[None] * (num_deltas == 1), *weights, EPS

    read_and_summed = 2 + num_deltas if num_deltas else 1
    return op_case(
        "add_" * (num_deltas > 0) + ("rms_norm" if is_rms else "layer_norm") + "_to_fp8" * to_fp8,
        f"{rows}x{dim}" + f" +{num_deltas}" * (num_deltas > 0),
        make,
        bytes_moved=rows * dim * (read_and_summed * HALF_BYTES + (FP8_BYTES if to_fp8 else HALF_BYTES)),
        flop=((5 if is_rms else 8) + (num_deltas > 0) + 3 * to_fp8) * rows * dim,
        tunings=norm_tunings(),
        gives_fp8=to_fp8,
    )


FLOP_PER_NUMBER = {"rows_to_fp8": 3, "gelu_to_fp8": 11, "silu_gate": 6, "silu_gate_to_fp8": 9}


def row_case(op: str, rows: int, dim: int) -> Case:
    """`dim` numbers of a result; a gate reads twice as many."""
    num_read, to_fp8 = 2 * dim if op.startswith("silu_gate") else dim, op.endswith("_to_fp8")
    return op_case(
        op,
        f"{rows}x{dim}",
        lambda maker: (maker.numbers(rows, num_read),),
        bytes_moved=rows * (num_read * HALF_BYTES + dim * (FP8_BYTES if to_fp8 else HALF_BYTES)),
        flop=FLOP_PER_NUMBER[op] * rows * dim,
        tunings=row_tunings(),
        gives_fp8=to_fp8,
    )


def _attention_case(crops: int, positions: int, heads: int, dim: int) -> Case:
    return Case(
        op="attend_crops",
        size=f"{crops} crops of {positions}, {heads}x{dim // heads}",
        plain=plain_vision.attend_crops,
        triton=_attend_crops,
        make=lambda maker: (maker.numbers(crops, positions, 3 * dim), heads),
        bytes_moved=4 * crops * positions * dim * HALF_BYTES,
        flop=4 * crops * positions**2 * dim,
        tunings=crop_attention_tunings(),
    )


def _attend_crops(qkv_NPC: Tensor, n_heads: int, tuning: CropTuning | None = None) -> Tensor:
    """What engines run on a Hopper GPU; the portable kernel elsewhere, and where its block sizes are asked for."""
    if tuning is not None or not qkv_NPC.is_cuda or torch.cuda.get_device_capability(qkv_NPC.device)[0] != HOPPER:
        return triton_vision.attend_crops(qkv_NPC, n_heads, tuning)
    return attend_crops_on_hopper(qkv_NPC, n_heads)
