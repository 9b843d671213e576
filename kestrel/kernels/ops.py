"""The operations of a fused forward pass as one bundle.

`PLAIN` is made of the references of this package and runs anywhere; `kestrel.kernels.triton.ops` makes the bundle of a
GPU. A model written against a bundle can so be proved on a CPU and run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from kestrel.kernels.commit_ids import commit_ids
from kestrel.kernels.fp8 import add_fp8_linear, fp8_linear, gelu_to_fp8, rows_to_fp8
from kestrel.kernels.linear import (
    add_linear,
    gated_linear,
    gelu_linear,
    linear,
    silu_gate,
    silu_gate_to_fp8,
    small_linear,
)
from kestrel.kernels.low_rank import (
    SlotTiles,
    add_deltas,
    add_input_deltas,
    add_output_deltas,
    small_adapted_linear,
    tile_slots,
)
from kestrel.kernels.moe_mlp import Work, moe_mlp, moe_mlp_adapted, moe_mlp_fp8, route_top_k, side_by_side
from kestrel.kernels.norms import (
    add_layer_norm,
    add_layer_norm_to_fp8,
    add_rms_norm,
    add_rms_norm_to_fp8,
    layer_norm,
    layer_norm_to_fp8,
    rms_norm,
    rms_norm_to_fp8,
)
from kestrel.kernels.paged_attention import attend_chunks, attend_rows
from kestrel.kernels.projection import project_and_store
from kestrel.kernels.rotary import rotate_and_store, stacked_tau_factors
from kestrel.kernels.row_tables import RowInputs, row_inputs
from kestrel.kernels.sampling import best_ids, draw_ids, weigh_ids
from kestrel.kernels.vision import attend_crops, join_crops, patchify, resample

Op: TypeAlias = Callable[..., Tensor]
PairOp: TypeAlias = Callable[..., tuple[Tensor, Tensor]]
TripleOp: TypeAlias = Callable[..., tuple[Tensor, Tensor, Tensor]]
InPlaceOp: TypeAlias = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Ops:
    """Each field has the contract of the function of that name in this package."""

    def __deepcopy__(self, _: object) -> Ops:
        """A copy of a model runs with the same operations."""
        return self

    layer_norm: Op
    add_layer_norm: PairOp
    small_linear: Op
    gated_linear: Op
    max_small_rows: int
    """Rows up to which `small_linear` is the better linear layer."""
    max_small_fp8_rows: int
    """Rows, two at least, that `fp8_linear` multiplies fast without filling up. 0: it has no such product; then a
    handful of rows are not rounded to float8 (`Linear.is_small`), and decode steps of dense models are filled up."""
    max_gated_rows: int
    """The same of `gated_linear`."""
    max_forked_rows: int
    """Rows up to which the halves of a parallel block are the faster `side_by_side`."""
    linear: Op
    gelu_linear: Op
    add_linear: Op
    rotate_and_store: Op
    project_and_store: Op
    attend_rows: Op
    attend_chunks: Op
    attend_crops: Op
    route_top_k: PairOp
    side_by_side: Callable[[Work, Work], tuple[Tensor, Tensor]]
    moe_mlp: Op
    moe_mlp_fp8: Op
    moe_mlp_adapted: Op
    tau_factors: PairOp
    resample: Op
    patchify: Op
    join_crops: Op
    weigh_ids: Op
    best_ids: Op
    draw_ids: Op
    commit_ids: PairOp
    row_inputs: Callable[..., RowInputs]
    layer_norm_to_fp8: PairOp
    add_layer_norm_to_fp8: TripleOp
    rms_norm: Op
    add_rms_norm: PairOp
    rms_norm_to_fp8: PairOp
    add_rms_norm_to_fp8: TripleOp
    silu_gate: Op
    silu_gate_to_fp8: PairOp
    rows_to_fp8: PairOp
    gelu_to_fp8: PairOp
    fp8_linear: Op
    add_fp8_linear: Op
    tile_slots: Callable[..., SlotTiles]
    small_adapted_linear: Op
    add_deltas: InPlaceOp
    add_input_deltas: InPlaceOp
    add_output_deltas: InPlaceOp


PLAIN = Ops(
    layer_norm=layer_norm,
    add_layer_norm=add_layer_norm,
    small_linear=small_linear,
    gated_linear=gated_linear,
    max_small_rows=16,
    max_small_fp8_rows=0,
    max_gated_rows=16,
    max_forked_rows=0,
    linear=linear,
    gelu_linear=gelu_linear,
    add_linear=add_linear,
    rotate_and_store=rotate_and_store,
    project_and_store=project_and_store,
    attend_rows=attend_rows,
    attend_chunks=attend_chunks,
    attend_crops=attend_crops,
    route_top_k=route_top_k,
    side_by_side=side_by_side,
    moe_mlp=moe_mlp,
    moe_mlp_fp8=moe_mlp_fp8,
    moe_mlp_adapted=moe_mlp_adapted,
    resample=resample,
    patchify=patchify,
    join_crops=join_crops,
    tau_factors=stacked_tau_factors,
    weigh_ids=weigh_ids,
    best_ids=best_ids,
    draw_ids=draw_ids,
    commit_ids=commit_ids,
    row_inputs=row_inputs,
    layer_norm_to_fp8=layer_norm_to_fp8,
    add_layer_norm_to_fp8=add_layer_norm_to_fp8,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    rms_norm_to_fp8=rms_norm_to_fp8,
    add_rms_norm_to_fp8=add_rms_norm_to_fp8,
    silu_gate=silu_gate,
    silu_gate_to_fp8=silu_gate_to_fp8,
    rows_to_fp8=rows_to_fp8,
    gelu_to_fp8=gelu_to_fp8,
    fp8_linear=fp8_linear,
    add_fp8_linear=add_fp8_linear,
    tile_slots=tile_slots,
    small_adapted_linear=small_adapted_linear,
    add_deltas=add_deltas,
    add_input_deltas=add_input_deltas,
    add_output_deltas=add_output_deltas,
)
