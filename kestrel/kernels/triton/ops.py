"""The bundle of a GPU: Triton kernels, and the vendor's matrix products where they are the faster ones."""

from __future__ import annotations

from torch import Tensor

from kestrel.kernels.crop_attention import attend_crops
from kestrel.kernels.fp8_linear import scaled_mm_linear
from kestrel.kernels.gelu_linear import gelu_linear_epilogue
from kestrel.kernels.ops import Ops
from kestrel.kernels.triton.best_ids import best_ids
from kestrel.kernels.triton.chunk_attention import attend_chunks
from kestrel.kernels.triton.commit_ids import commit_ids
from kestrel.kernels.triton.fp8_rows import gelu_to_fp8, rows_to_fp8
from kestrel.kernels.triton.layer_norm import add_layer_norm, add_layer_norm_to_fp8, layer_norm, layer_norm_to_fp8
from kestrel.kernels.triton.low_rank import add_input_deltas, add_output_deltas, tile_slots
from kestrel.kernels.triton.moe_grouped import moe_grouped, moe_grouped_fp8
from kestrel.kernels.triton.moe_small import moe_small
from kestrel.kernels.triton.paged_attention import attend_rows
from kestrel.kernels.triton.patchify import patchify
from kestrel.kernels.triton.resample import resample
from kestrel.kernels.triton.rotate_and_store import rotate_and_store
from kestrel.kernels.triton.route import route_top_k
from kestrel.kernels.triton.row_inputs import row_inputs
from kestrel.kernels.triton.small_linear import MAX_ROWS, small_linear
from kestrel.kernels.triton.tau import tau_factors

FEW_TOKENS = 4
"""Up to so many, experts are read once per token; with more of them the same experts are met again."""


def moe_mlp(
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    fc1_EFD: Tensor,
    fc2_EDI: Tensor,
    fc1_scale_EF: Tensor | None = None,
    fc2_scale_ED: Tensor | None = None,
) -> Tensor:
    run = moe_small if len(x_TD) <= FEW_TOKENS else moe_grouped
    return run(x_TD, weights_TK, ids_TK, fc1_EFD, fc2_EDI, fc1_scale_EF, fc2_scale_ED)


TRITON = Ops(
    layer_norm=layer_norm,
    add_layer_norm=add_layer_norm,
    small_linear=small_linear,
    max_small_rows=MAX_ROWS,
    gelu_linear=gelu_linear_epilogue,
    rotate_and_store=rotate_and_store,
    attend_rows=attend_rows,
    attend_chunks=attend_chunks,
    attend_crops=attend_crops,
    route_top_k=route_top_k,
    moe_mlp=moe_mlp,
    moe_mlp_fp8=moe_grouped_fp8,
    resample=resample,
    patchify=patchify,
    tau_factors=tau_factors,
    best_ids=best_ids,
    commit_ids=commit_ids,
    row_inputs=row_inputs,
    layer_norm_to_fp8=layer_norm_to_fp8,
    add_layer_norm_to_fp8=add_layer_norm_to_fp8,
    rows_to_fp8=rows_to_fp8,
    gelu_to_fp8=gelu_to_fp8,
    fp8_linear=scaled_mm_linear,
    tile_slots=tile_slots,
    add_input_deltas=add_input_deltas,
    add_output_deltas=add_output_deltas,
)
