"""Mixture-of-experts MLP for many tokens: blocks of pairs that share an expert go through its matrices together.

Four kernels: pairs are put in blocks (`kestrel.kernels.triton.moe_grouping`); each block makes GELU(h) · (g + 1), both
halves of fc1 in one pass over its tokens; each block goes through fc2; a token's experts are added up in fp32, in
routing order. Blocks of one expert run side by side, so that its matrices are read from memory once.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from kestrel.kernels.moe_mlp import ExpertDeltas
from kestrel.kernels.triton.activations import gelu_erf
from kestrel.kernels.triton.fp8_rows import rows_to_fp8
from kestrel.kernels.triton.moe_deltas import add_pair_deltas, pair_deltas
from kestrel.kernels.triton.moe_grouping import Blocks, group_pairs
from kestrel.kernels.triton.tuning_table import NO_TABLE, TuningTable
from kestrel.kernels.triton.widening import widened


@dataclass(frozen=True, slots=True)
class Tuning:
    rows_per_block: int = 64
    gate_outputs: int = 64
    mix_outputs: int = 128
    block_in: int = 64
    num_warps: int = 4
    num_stages: int = 4

    @classmethod
    def of(cls, num_pairs: int, num_experts: int) -> Tuning:
        """Blocks about as large as an expert's usual share of the pairs."""
        share = num_pairs / num_experts
        if share > 96:
            return cls(rows_per_block=128, num_warps=8, num_stages=3)
        rows = next((rows for rows in (16, 32) if share <= 0.75 * rows), 64)
        return cls(rows_per_block=rows)

    @classmethod
    def of_fp8(cls, num_pairs: int, num_experts: int) -> Tuning:
        """The same for numbers of one byte: twice as many of them in a block."""
        share = num_pairs / num_experts
        if share > 48:
            return cls(rows_per_block=128, block_in=128, num_warps=8, num_stages=3)
        rows = next((rows for rows in (16, 32) if share <= 0.75 * rows), 64)
        return cls(rows_per_block=rows, block_in=128, num_stages=3)


@triton.jit
def _factor(x, dtype, WIDENS: tl.constexpr):
    return x.to(tl.float32) if WIDENS else widened(x, dtype)


@triton.jit
def _gate_blocks(
    x_ptr, x_scale_ptr, pairs_ptr, expert_ptr, fc1_ptr, scale_ptr, delta_ptr, slots_ptr, hidden_ptr,
    num_in, num_inner, x_stride,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_X_SCALE: tl.constexpr, HAS_DELTA: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    expert = tl.load(expert_ptr + group).to(tl.int64)
    if expert < 0:
        return
    rows = group * ROWS + tl.arange(0, ROWS)
    pairs = tl.load(pairs_ptr + rows)
    i = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    first = expert * (2 * num_inner)
    x_place = x_ptr + (pairs // TOP_K).to(tl.int64)[:, None] * x_stride
    h_place = fc1_ptr + (first + i)[:, None] * num_in
    g_place = fc1_ptr + (first + num_inner + i)[:, None] * num_in
    h = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    g = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for start in range(0, num_in, BLOCK):
        d = start + tl.arange(0, BLOCK)[None, :]
        if EVEN:
            x = tl.load(x_place + d, mask=(pairs >= 0)[:, None], other=0.0)
            w_h, w_g = tl.load(h_place + d), tl.load(g_place + d)
        else:
            inside = (d < num_in) & (i < num_inner)[:, None]
            x = tl.load(x_place + d, mask=(pairs >= 0)[:, None] & (d < num_in), other=0.0)
            w_h, w_g = tl.load(h_place + d, mask=inside, other=0.0), tl.load(g_place + d, mask=inside, other=0.0)
        x = _factor(x, x.dtype, WIDENS)
        h = tl.dot(x, tl.trans(_factor(w_h, x.dtype, WIDENS)), h, input_precision="ieee")
        g = tl.dot(x, tl.trans(_factor(w_g, x.dtype, WIDENS)), g, input_precision="ieee")
    if HAS_SCALE:
        h *= tl.load(scale_ptr + first + i, mask=i < num_inner, other=0.0)[None, :]
        g *= tl.load(scale_ptr + first + num_inner + i, mask=i < num_inner, other=0.0)[None, :]
    if HAS_X_SCALE:
        x_scale = tl.load(x_scale_ptr + pairs // TOP_K, mask=pairs >= 0, other=0.0)[:, None]
        h *= x_scale
        g *= x_scale
    if HAS_DELTA:
        slots = tl.load(slots_ptr + pairs // TOP_K, mask=pairs >= 0, other=-1)
        has_delta = (slots >= 0)[:, None] & (i < num_inner)[None, :]
        delta_place = delta_ptr + pairs.to(tl.int64)[:, None] * (2 * num_inner) + i[None, :]
        h += tl.load(delta_place, mask=has_delta, other=0.0).to(tl.float32)
        g += tl.load(delta_place + num_inner, mask=has_delta, other=0.0).to(tl.float32)
    out = (gelu_erf(h) * (g + 1.0)).to(hidden_ptr.dtype.element_ty)
    tl.store(hidden_ptr + rows.to(tl.int64)[:, None] * num_inner + i[None, :], out, mask=(i < num_inner)[None, :])


@triton.jit
def _project_blocks(
    hidden_ptr, hidden_scale_ptr, pairs_ptr, expert_ptr, fc2_ptr, scale_ptr, out_ptr, num_inner, num_out,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_HIDDEN_SCALE: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    expert = tl.load(expert_ptr + group).to(tl.int64)
    if expert < 0:
        return
    rows = group * ROWS + tl.arange(0, ROWS)
    pairs = tl.load(pairs_ptr + rows)
    f = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    hidden_place = hidden_ptr + rows.to(tl.int64)[:, None] * num_inner
    w_place = fc2_ptr + (expert * num_out + f)[:, None] * num_inner
    total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for start in range(0, num_inner, BLOCK):
        i = start + tl.arange(0, BLOCK)[None, :]
        if EVEN:
            hidden, w = tl.load(hidden_place + i), tl.load(w_place + i)
        else:
            hidden = tl.load(hidden_place + i, mask=(i < num_inner) & (rows >= 0)[:, None], other=0.0)
            w = tl.load(w_place + i, mask=(i < num_inner) & (f < num_out)[:, None], other=0.0)
        hidden = _factor(hidden, hidden.dtype, WIDENS)
        total = tl.dot(hidden, tl.trans(_factor(w, hidden.dtype, WIDENS)), total, input_precision="ieee")
    if HAS_SCALE:
        total *= tl.load(scale_ptr + expert * num_out + f, mask=f < num_out, other=0.0)[None, :]
    if HAS_HIDDEN_SCALE:
        total *= tl.load(hidden_scale_ptr + rows)[:, None]
    place = out_ptr + pairs.to(tl.int64)[:, None] * num_out + f[None, :]
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=(pairs >= 0)[:, None] & (f < num_out)[None, :])


@triton.jit
def _add_experts(out_ptr, weights_ptr, y_ptr, num_out, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
        pair = token * TOP_K + k
        out = tl.load(out_ptr + pair * num_out + f, mask=f < num_out, other=0.0).to(tl.float32)
        total += tl.load(weights_ptr + pair) * out
    tl.store(y_ptr + token * num_out + f, total.to(y_ptr.dtype.element_ty), mask=f < num_out)


def moe_grouped(
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    fc1_EFD: Tensor,
    fc2_EDI: Tensor,
    fc1_scale_EF: Tensor | None = None,
    fc2_scale_ED: Tensor | None = None,
    deltas: ExpertDeltas | None = None,
    tuning: Tuning | None = None,
    table: TuningTable = NO_TABLE,
) -> Tensor:
    """What `kestrel.kernels.moe_mlp.moe_mlp` gives, or `moe_mlp_adapted`; scales are those of matrices kept in float8,
    one per output."""
    num_tokens, num_in = x_TD.shape
    num_experts, num_out, num_inner = fc2_EDI.shape
    assert fc1_EFD.shape == (num_experts, 2 * num_inner, num_in)
    assert weights_TK.shape == ids_TK.shape
    assert x_TD.stride(1) == 1
    for tensor in (weights_TK, fc1_EFD, fc2_EDI, fc1_scale_EF, fc2_scale_ED):
        assert tensor is None or tensor.is_contiguous()
    if num_tokens == 0:
        return torch.empty(0, num_out, dtype=x_TD.dtype, device=x_TD.device)
    dims = num_experts, ids_TK.shape[1], num_inner, num_in
    found = tuning or table.find("moe_grouped", num_tokens, dims, x_TD.dtype, fc1_EFD.dtype)
    chosen = found or Tuning.of(ids_TK.numel(), num_experts)
    blocks = group_pairs(ids_TK, num_experts, chosen.rows_per_block)
    x, dtype = ScaledRows(x_TD), x_TD.dtype
    added = None
    if deltas is not None:
        added = pair_deltas(x_TD, ids_TK, deltas.slot_T, deltas.fc1, blocks), deltas.slot_T
    hidden_RI = _gated(x, ids_TK.shape[1], blocks, fc1_EFD, fc1_scale_EF, chosen, dtype, added)
    out_QD = _projected(ScaledRows(hidden_RI), ids_TK.numel(), blocks, fc2_EDI, fc2_scale_ED, chosen, dtype)
    if deltas is not None:
        add_pair_deltas(out_QD, hidden_RI, ids_TK, deltas.slot_T, deltas.fc2, blocks)
    return _summed(out_QD, weights_TK)


def moe_grouped_fp8(
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    fc1_EFD: Tensor,
    fc2_EDI: Tensor,
    fc1_scale_EF: Tensor,
    fc2_scale_ED: Tensor,
    tuning: Tuning | None = None,
    table: TuningTable = NO_TABLE,
) -> Tensor:
    """What `kestrel.kernels.moe_mlp.moe_mlp_fp8` gives: rows are quantised too, and the tensor cores take float8."""
    num_tokens, num_in = x_TD.shape
    num_experts, num_out, num_inner = fc2_EDI.shape
    if num_tokens == 0:
        return torch.empty(0, num_out, dtype=x_TD.dtype, device=x_TD.device)
    dims = num_experts, ids_TK.shape[1], num_inner, num_in
    found = tuning or table.find("moe_grouped_fp8", num_tokens, dims, x_TD.dtype, fc1_EFD.dtype)
    chosen = found or Tuning.of_fp8(ids_TK.numel(), num_experts)
    blocks = group_pairs(ids_TK, num_experts, chosen.rows_per_block)
    x, dtype = ScaledRows(*rows_to_fp8(x_TD, table=table)), x_TD.dtype
    hidden_RI = _gated(x, ids_TK.shape[1], blocks, fc1_EFD, fc1_scale_EF, chosen, dtype)
    hidden = ScaledRows(*rows_to_fp8(hidden_RI, table=table))
    out_QD = _projected(hidden, ids_TK.numel(), blocks, fc2_EDI, fc2_scale_ED, chosen, dtype)
    return _summed(out_QD, weights_TK)


class ScaledRows(NamedTuple):
    """Rows as they are, or in float8 with a scale each."""

    numbers: Tensor
    scale: Tensor | None = None


def _widens(rows: ScaledRows) -> bool:
    """Triton's interpreter has no products of float8."""
    return rows.scale is not None and not isinstance(_factor, JITFunction)


def _summed(out_QD: Tensor, weights_TK: Tensor) -> Tensor:
    num_tokens, top_k = weights_TK.shape
    num_out = out_QD.shape[1]
    y_TD = torch.empty(num_tokens, num_out, dtype=out_QD.dtype, device=out_QD.device)
    block = min(1024, triton.next_power_of_2(num_out))
    _add_experts[(num_tokens, triton.cdiv(num_out, block))](out_QD, weights_TK, y_TD, num_out, TOP_K=top_k, BLOCK=block)
    return y_TD


def _gated(
    x: ScaledRows,
    top_k: int,
    blocks: Blocks,
    fc1_EFD: Tensor,
    scale_EF: Tensor | None,
    tuning: Tuning,
    dtype: torch.dtype,
    added: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """GELU(h) · (g + 1) of every place; places without a pair hold what a token of zeros would give. `added`: deltas of
    pairs, and the slots of tokens, which say whether there is one."""
    x_TD = x.numbers
    num_inner, num_in = fc1_EFD.shape[1] // 2, fc1_EFD.shape[2]
    hidden_RI = torch.empty(len(blocks.pairs_R), num_inner, dtype=dtype, device=x_TD.device)
    block, outputs = _fitting(tuning.block_in, num_in), _fitting(tuning.gate_outputs, num_inner)
    _gate_blocks[(len(blocks.expert_G), triton.cdiv(num_inner, outputs))](
        x_TD, x_TD if x.scale is None else x.scale,
        blocks.pairs_R, blocks.expert_G, fc1_EFD, x_TD if scale_EF is None else scale_EF,
        *(added or (x_TD, blocks.pairs_R)), hidden_RI,
        num_in, num_inner, x_TD.stride(0),
        TOP_K=top_k, ROWS=blocks.rows_per_block, OUTPUTS=outputs, BLOCK=block,
        EVEN=num_in % block == 0 and num_inner % outputs == 0,
        HAS_SCALE=scale_EF is not None, HAS_X_SCALE=x.scale is not None, HAS_DELTA=added is not None,
        WIDENS=_widens(x),
        num_warps=tuning.num_warps, num_stages=tuning.num_stages,
    )  # fmt: skip
    return hidden_RI


def _projected(
    hidden: ScaledRows,
    num_pairs: int,
    blocks: Blocks,
    fc2_EDI: Tensor,
    scale_ED: Tensor | None,
    tuning: Tuning,
    dtype: torch.dtype,
) -> Tensor:
    """fc2 of every pair, in the order of the pairs."""
    hidden_RI = hidden.numbers
    _, num_out, num_inner = fc2_EDI.shape
    out_QD = torch.empty(num_pairs, num_out, dtype=dtype, device=hidden_RI.device)
    block, outputs = _fitting(tuning.block_in, num_inner), _fitting(tuning.mix_outputs, num_out)
    _project_blocks[(len(blocks.expert_G), triton.cdiv(num_out, outputs))](
        hidden_RI, hidden_RI if hidden.scale is None else hidden.scale,
        blocks.pairs_R, blocks.expert_G, fc2_EDI, hidden_RI if scale_ED is None else scale_ED, out_QD,
        num_inner, num_out,
        ROWS=blocks.rows_per_block, OUTPUTS=outputs, BLOCK=block,
        EVEN=num_inner % block == 0 and num_out % outputs == 0,
        HAS_SCALE=scale_ED is not None, HAS_HIDDEN_SCALE=hidden.scale is not None, WIDENS=_widens(hidden),
        num_warps=tuning.num_warps, num_stages=tuning.num_stages,
    )  # fmt: skip
    return out_QD


def _fitting(block: int, size: int) -> int:
    """A block no larger than the size needs, but large enough for the tensor cores."""
    return max(16, min(block, triton.next_power_of_2(size)))
