"""Block sizes worth trying for each kernel on a large GPU."""

from __future__ import annotations

from itertools import product
from typing import Any

from triton import next_power_of_2

from kestrel.kernels.triton import (
    fp8,
    linear,
    low_rank,
    moe_grouped,
    moe_mlp,
    norms,
    paged_attention,
    rotary,
    row_tables,
    sampling,
    vision,
)


def norm_tunings() -> tuple[Any, ...]:
    return tuple(norms.Tuning(warps, rows) for warps, rows in product((1, 2, 4, 8), (1, 4, 16)))


def row_tunings() -> tuple[Any, ...]:
    return tuple(fp8.RowTuning(warps) for warps in (1, 2, 4, 8))


def crop_attention_tunings() -> tuple[Any, ...]:
    tried = ((128, 64, 4), (128, 64, 8), (64, 64, 4), (128, 128, 8), (64, 128, 4), (128, 32, 4), (64, 32, 4))
    return tuple(vision.CropTuning(*blocks, stages) for blocks, stages in product(tried, (2, 3)))


def decode_tunings() -> tuple[Any, ...]:
    tried = product(((16, 1), (16, 2), (32, 1), (32, 2), (32, 4), (64, 2), (64, 4)), (512, 1024, 2048))
    return tuple(paged_attention.RowsTuning(keys, warps, target_programs=programs) for (keys, warps), programs in tried)


def chunk_tunings(max_count: int) -> tuple[Any, ...]:
    """Long chunks: blocks for the fast tensor-core path. Short ones: the smallest block that holds them, and 64."""
    if max_count > 64:
        tried = ((128, 64, 4), (128, 64, 8), (128, 128, 8), (64, 64, 4), (64, 128, 4), (128, 32, 4))
        return tuple(paged_attention.ChunksTuning(*blocks, stages) for blocks, stages in product(tried, (2, 3, 4)))
    queries = paged_attention.ChunksTuning.of(max_count, head_dim=64).block_queries
    tried = product(dict.fromkeys((queries, 64)), ((32, 4), (64, 2), (64, 4), (128, 4), (128, 8)), (3, 4))
    return tuple(paged_attention.ChunksTuning(size, *keys, stages) for size, keys, stages in tried)


def rotate_tunings() -> tuple[Any, ...]:
    return tuple(rotary.RotateTuning(heads, warps) for heads, warps in product((4, 8, 16, 32), (1, 2, 4)))


def tau_tunings(num_tokens: int) -> tuple[Any, ...]:
    if num_tokens <= rotary.SUMMED_TOKENS:
        return tuple(rotary.SumTuning(*tried) for tried in product((1, 2, 4, 8), (1024, 2048), (4, 8)))
    tried = product(((64, 64, 64), (64, 64, 128), (128, 64, 64), (32, 64, 128)), (128, 256, 512), (4, 8), (2, 4))
    return tuple(rotary.DotTuning(*blocks, *rest) for blocks, *rest in tried)


def small_linear_tunings(num_rows: int) -> tuple[Any, ...]:
    if num_rows <= linear.SUMMED_ROWS:
        tried = product((1, 2, 4), (512, 1024, 2048), (2, 4, 8))
        return tuple(linear.Tuning(outs, ins, warps) for outs, ins, warps in tried)
    blocks = ((16, 256), (16, 512), (32, 128), (32, 256), (64, 64), (64, 128), (128, 64))
    return tuple(linear.Tuning(*block, warps, stages) for block, warps, stages in product(blocks, (4, 8), (3, 5)))


def small_fp8_linear_tunings() -> tuple[Any, ...]:
    blocks = ((16, 512), (32, 256), (64, 128), (64, 256), (128, 128), (128, 256))
    return tuple(linear.Tuning(*block, warps, stages) for block, warps, stages in product(blocks, (4, 8), (3, 5, 8)))


def moe_small_tunings() -> tuple[Any, ...]:
    tried = product((1, 2, 4), (1, 2, 4), (1024, 2048), (4, 8))
    return tuple(moe_mlp.Tuning(*blocks) for blocks in tried)


def moe_grouped_tunings(pairs_per_expert: float) -> tuple[Any, ...]:
    outputs, rest = ((64, 64), (64, 128), (128, 128), (128, 256)), ((64, 4, 4), (64, 8, 3), (128, 8, 3))
    tried = product(_rows_per_block(pairs_per_expert), outputs, rest)
    return tuple(moe_grouped.Tuning(rows, *outs, *more) for rows, outs, more in tried)


def moe_fp8_tunings(pairs_per_expert: float) -> tuple[Any, ...]:
    """The same with blocks for matrices in float8."""
    outputs, rest = ((64, 64), (64, 128), (128, 128)), ((64, 4, 4), (128, 4, 3), (128, 8, 3), (256, 8, 3))
    tried = product(_rows_per_block(pairs_per_expert), outputs, rest)
    return tuple(moe_grouped.Tuning(rows, *outs, *more) for rows, outs, more in tried)


def _rows_per_block(pairs_per_expert: float) -> list[int]:
    """From half to twice an expert's share of the pairs."""
    fitting = [size for size in (16, 32, 64, 128) if 0.5 * pairs_per_expert <= size <= 2 * max(16.0, pairs_per_expert)]
    return fitting or [128]


def weigh_ids_tunings() -> tuple[Any, ...]:
    return tuple(sampling.WeighTuning(*tried) for tried in product((512, 1024, 2048, 4096), (2, 4, 8)))


def best_ids_tunings() -> tuple[Any, ...]:
    return tuple(sampling.BestTuning(*tried) for tried in product((512, 1024, 2048, 4096), (2, 4, 8)))


def draw_ids_tunings() -> tuple[Any, ...]:
    blocks, rows = ((512, 2), (512, 4), (1024, 4), (2048, 4)), ((4096, 16), (8192, 16), (8192, 32), (16384, 32))
    return tuple(sampling.DrawTuning(*block, *row) for block, row in product(blocks, rows))


def row_inputs_tunings() -> tuple[Any, ...]:
    return tuple(row_tables.Tuning(*tried) for tried in product((64, 128, 256), (1, 2, 4)))


def low_rank_tunings(rows_per_tile: int, max_rank: int) -> tuple[Any, ...]:
    """Few rows: how the factors are cut up. Many: blocks of two matrix products."""
    is_small = max_rank <= low_rank.SMALL_RANK
    if rows_per_tile <= low_rank.FEW_ROWS:
        columns = (256, 512, 1024) if is_small else (512, 1024, 2048)
        outputs = ((32, 16), (64, 32), (128, 32)) if is_small else ((16, 16), (32, 16), (64, 32))
        expand = ((16,) if max_rank <= 16 else (16, 32)) if is_small else (64, 128)
        tried = product((128, 256), columns, outputs, expand, (2, 4), (3, 4))
        return tuple(low_rank.Tuning(16, ins, cols, *outs, *rest) for ins, cols, outs, *rest in tried)
    if is_small:
        # Most of the time goes to adding small deltas to wide rows: several sizes of that block.
        cuts = ((64, 512), (64, 1024), (64, 2048), (128, 512), (128, 1024), (256, 1024))
        blocks = product(dict.fromkeys((16, max(16, next_power_of_2(max_rank)))), cuts, (32, 64, 128, 256))
        tried = ((r, *cut, outs, outs, min(r, 32)) for r, cut, outs in blocks)
        launches = ((4, 2), (4, 3), (8, 2), (8, 3))
        return tuple(low_rank.Tuning(*block, *launch) for block, launch in product(tried, launches))
    tried = product((64, 128), (64, 128), (1024, 2048, 8192), (64, 128), (32, 64), (4, 8), (3,))
    return tuple(low_rank.Tuning(r, ins, cols, outs, outs, *rest) for r, ins, cols, outs, *rest in tried)
