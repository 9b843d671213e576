"""The operations that ask a table: what their tunings are made of, and what their sizes are called in a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kestrel.kernels.triton import (
    best_ids,
    chunk_attention,
    draw_ids,
    fp8_rows,
    layer_norm,
    low_rank_shrink,
    moe_grouped,
    moe_small,
    paged_attention,
    rotate_and_store,
    row_inputs,
    small_linear,
    tau,
)


@dataclass(frozen=True, slots=True)
class TunedOp:
    kinds: tuple[type[Any], ...]
    """Classes of its tunings, told apart by their fields."""
    dims: tuple[str, ...]
    num_dtypes: int = 1
    """Two: of the rows, and of the matrices or the cache."""


_ROW = ("dim",)
_HEADS = ("heads", "kv_heads", "head_dim")
_EXPERTS = ("experts", "per_token", "inner_dim", "dim")

TUNED_OPS = {
    "layer_norm": TunedOp((layer_norm.Tuning,), _ROW),
    "add_layer_norm": TunedOp((layer_norm.Tuning,), _ROW),
    "layer_norm_to_fp8": TunedOp((layer_norm.Tuning,), _ROW),
    "add_layer_norm_to_fp8": TunedOp((layer_norm.Tuning,), _ROW),
    "rows_to_fp8": TunedOp((fp8_rows.Tuning,), _ROW),
    "gelu_to_fp8": TunedOp((fp8_rows.Tuning,), _ROW),
    "small_linear": TunedOp((small_linear.Tuning,), ("num_out", "num_in"), num_dtypes=2),
    "rotate_and_store": TunedOp((rotate_and_store.Tuning,), _HEADS),
    "attend_rows": TunedOp((paged_attention.Tuning,), _HEADS, num_dtypes=2),
    "attend_chunks": TunedOp((chunk_attention.Tuning,), _HEADS, num_dtypes=2),
    "tau_factors": TunedOp((tau.SumTuning, tau.DotTuning), ("num_out", "num_in")),
    "moe_small": TunedOp((moe_small.Tuning,), _EXPERTS, num_dtypes=2),
    "moe_grouped": TunedOp((moe_grouped.Tuning,), _EXPERTS, num_dtypes=2),
    "moe_grouped_fp8": TunedOp((moe_grouped.Tuning,), _EXPERTS, num_dtypes=2),
    "best_ids": TunedOp((best_ids.Tuning,), ("vocab",)),
    "draw_ids": TunedOp((draw_ids.Tuning,), ("vocab",)),
    "row_inputs": TunedOp((row_inputs.Tuning,), ()),
    "add_input_deltas": TunedOp((low_rank_shrink.Tuning,), ("rows_per_tile", "max_rank", "dim", "qkv_dim", "ff_dim")),
    "add_output_deltas": TunedOp((low_rank_shrink.Tuning,), ("rows_per_tile", "max_rank", "dim", "ff_dim")),
}
