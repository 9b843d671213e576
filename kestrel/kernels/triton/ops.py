"""The bundle of a GPU: Triton kernels, and the vendor's matrix products where they are the faster ones."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kestrel.kernels import cublaslt
from kestrel.kernels.cublaslt import add_fp8_linear, add_linear, gelu_linear, linear
from kestrel.kernels.ops import Op, Ops
from kestrel.kernels.triton.commit_ids import commit_ids
from kestrel.kernels.triton.fp8 import gelu_to_fp8, rows_to_fp8
from kestrel.kernels.triton.launch import NO_TABLE, TuningTable, side_by_side
from kestrel.kernels.triton.linear import (
    MAX_FORKED_ROWS,
    MAX_ROWS,
    gated_linear,
    silu_gate,
    silu_gate_to_fp8,
    small_fp8_linear,
    small_linear,
)
from kestrel.kernels.triton.low_rank import (
    add_deltas,
    add_input_deltas,
    add_output_deltas,
    small_adapted_linear,
    tile_slots,
)
from kestrel.kernels.triton.moe_grouped import moe_grouped, moe_grouped_fp8
from kestrel.kernels.triton.moe_mlp import moe_mlp, route_top_k
from kestrel.kernels.triton.norms import (
    add_layer_norm,
    add_layer_norm_to_fp8,
    add_rms_norm,
    add_rms_norm_to_fp8,
    layer_norm,
    layer_norm_to_fp8,
    rms_norm,
    rms_norm_to_fp8,
)
from kestrel.kernels.triton.paged_attention import attend_chunks, attend_rows
from kestrel.kernels.triton.projection import project_and_store
from kestrel.kernels.triton.rotary import rotate_and_store, tau_factors
from kestrel.kernels.triton.row_tables import row_inputs
from kestrel.kernels.triton.sampling import best_ids, draw_ids, weigh_ids
from kestrel.kernels.triton.vision import join_crops, patchify, resample
from kestrel.kernels.vision import attend_crops


def triton_ops(
    table: TuningTable,
    attend_crops: Op = attend_crops,
    attend_chunks: Op = attend_chunks,
    max_gated_rows: int = MAX_ROWS,
    max_small_fp8_rows: int = 0,
) -> Ops:
    """The bundle with the block sizes and algorithms of a table; rules decide where it has none."""
    return Ops(
        layer_norm=partial(layer_norm, table=table),
        add_layer_norm=partial(add_layer_norm, table=table),
        small_linear=partial(small_linear, table=table),
        gated_linear=partial(gated_linear, table=table),
        max_small_rows=MAX_ROWS,
        max_small_fp8_rows=max_small_fp8_rows,
        max_gated_rows=max_gated_rows,
        max_forked_rows=MAX_FORKED_ROWS,
        linear=partial(linear, table=table),
        gelu_linear=partial(gelu_linear, table=table),
        add_linear=partial(add_linear, table=table),
        rotate_and_store=partial(rotate_and_store, table=table),
        project_and_store=partial(project_and_store, table=table),
        attend_rows=partial(attend_rows, table=table),
        attend_chunks=partial(attend_chunks, table=table),
        attend_crops=attend_crops,
        route_top_k=route_top_k,
        side_by_side=side_by_side,
        moe_mlp=partial(moe_mlp, table=table),
        moe_mlp_fp8=partial(moe_grouped_fp8, table=table),
        moe_mlp_adapted=partial(moe_grouped, table=table),
        resample=resample,
        patchify=patchify,
        join_crops=join_crops,
        tau_factors=partial(tau_factors, table=table),
        weigh_ids=partial(weigh_ids, table=table),
        best_ids=partial(best_ids, table=table),
        draw_ids=partial(draw_ids, table=table),
        commit_ids=commit_ids,
        row_inputs=partial(row_inputs, table=table),
        layer_norm_to_fp8=partial(layer_norm_to_fp8, table=table),
        add_layer_norm_to_fp8=partial(add_layer_norm_to_fp8, table=table),
        rms_norm=partial(rms_norm, table=table),
        add_rms_norm=partial(add_rms_norm, table=table),
        rms_norm_to_fp8=partial(rms_norm_to_fp8, table=table),
        add_rms_norm_to_fp8=partial(add_rms_norm_to_fp8, table=table),
        silu_gate=partial(silu_gate, table=table),
        silu_gate_to_fp8=partial(silu_gate_to_fp8, table=table),
        rows_to_fp8=partial(rows_to_fp8, table=table),
        gelu_to_fp8=partial(gelu_to_fp8, table=table),
        fp8_linear=partial(fp8_linear, max_small_rows=max_small_fp8_rows, table=table),
        add_fp8_linear=partial(add_fp8_linear, table=table),
        tile_slots=tile_slots,
        small_adapted_linear=partial(small_adapted_linear, table=table),
        add_deltas=partial(add_deltas, table=table),
        add_input_deltas=partial(add_input_deltas, table=table),
        add_output_deltas=partial(add_output_deltas, table=table),
    )


def fp8_linear(
    x_fp8_TD: Tensor,
    x_scale_T1: Tensor,
    weight_fp8_FD: Tensor,
    weight_scale_F: Tensor,
    bias_F: Tensor | None,
    out_dtype: torch.dtype,
    *,
    max_small_rows: int,
    table: TuningTable,
) -> Tensor:
    """The vendor's product takes as long for a handful of rows as for 64."""
    run = small_fp8_linear if x_fp8_TD.shape[0] <= max_small_rows else cublaslt.fp8_linear
    return run(x_fp8_TD, x_scale_T1, weight_fp8_FD, weight_scale_F, bias_F, out_dtype, table=table)


TRITON = triton_ops(NO_TABLE)
"""With the rules alone."""
