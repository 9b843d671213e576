"""Mixture-of-experts MLP for many tokens: blocks of pairs that share an expert go through its matrices together.

Four kernels: pairs are put in blocks (`kestrel.kernels.triton.moe_grouping`); each block makes GELU(h) · (g + 1), both
halves of fc1 in one pass over its tokens; each block goes through fc2; a token's experts are added up in fp32, in
routing order. Blocks of one expert run side by side, so that its matrices are read from memory once.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel.kernels.triton.activations import gelu_erf
from kestrel.kernels.triton.moe_grouping import Blocks, group_pairs


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


@triton.jit
def _gate_blocks(
    x_ptr, pairs_ptr, expert_ptr, fc1_ptr, scale_ptr, hidden_ptr, num_in, num_inner, x_stride,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
    HAS_SCALE: tl.constexpr,
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
        h = tl.dot(x, tl.trans(w_h.to(x.dtype)), h, input_precision="ieee")
        g = tl.dot(x, tl.trans(w_g.to(x.dtype)), g, input_precision="ieee")
    if HAS_SCALE:
        h *= tl.load(scale_ptr + first + i, mask=i < num_inner, other=0.0)[None, :]
        g *= tl.load(scale_ptr + first + num_inner + i, mask=i < num_inner, other=0.0)[None, :]
    out = (gelu_erf(h) * (g + 1.0)).to(hidden_ptr.dtype.element_ty)
    tl.store(hidden_ptr + rows.to(tl.int64)[:, None] * num_inner + i[None, :], out, mask=(i < num_inner)[None, :])


@triton.jit
def _project_blocks(
    hidden_ptr, pairs_ptr, expert_ptr, fc2_ptr, scale_ptr, out_ptr, num_inner, num_out,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, HAS_SCALE: tl.constexpr,
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
        total = tl.dot(hidden, tl.trans(w.to(hidden.dtype)), total, input_precision="ieee")
    if HAS_SCALE:
        total *= tl.load(scale_ptr + expert * num_out + f, mask=f < num_out, other=0.0)[None, :]
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
    tuning: Tuning | None = None,
) -> Tensor:
    """What `kestrel.kernels.moe_mlp.moe_mlp` gives; scales are those of matrices kept in float8, one per output."""
    num_tokens, num_in = x_TD.shape
    num_experts, num_out, num_inner = fc2_EDI.shape
    assert fc1_EFD.shape == (num_experts, 2 * num_inner, num_in)
    assert weights_TK.shape == ids_TK.shape
    assert x_TD.stride(1) == 1
    for tensor in (weights_TK, fc1_EFD, fc2_EDI, fc1_scale_EF, fc2_scale_ED):
        assert tensor is None or tensor.is_contiguous()
    y_TD = torch.empty(num_tokens, num_out, dtype=x_TD.dtype, device=x_TD.device)
    if num_tokens == 0:
        return y_TD
    chosen = tuning or Tuning.of(ids_TK.numel(), num_experts)
    blocks = group_pairs(ids_TK, num_experts, chosen.rows_per_block)
    hidden = _gated(x_TD, ids_TK.shape[1], blocks, fc1_EFD, fc1_scale_EF, chosen)
    out = _projected(hidden, ids_TK.numel(), blocks, fc2_EDI, fc2_scale_ED, chosen)
    block = min(1024, triton.next_power_of_2(num_out))
    _add_experts[(num_tokens, triton.cdiv(num_out, block))](
        out, weights_TK, y_TD, num_out, TOP_K=ids_TK.shape[1], BLOCK=block
    )
    return y_TD


def _gated(
    x_TD: Tensor, top_k: int, blocks: Blocks, fc1_EFD: Tensor, scale_EF: Tensor | None, tuning: Tuning
) -> Tensor:
    """GELU(h) · (g + 1) of every place; places without a pair hold what a token of zeros would give."""
    num_inner, num_in = fc1_EFD.shape[1] // 2, fc1_EFD.shape[2]
    hidden_RI = torch.empty(len(blocks.pairs_R), num_inner, dtype=x_TD.dtype, device=x_TD.device)
    block, outputs = _fitting(tuning.block_in, num_in), _fitting(tuning.gate_outputs, num_inner)
    _gate_blocks[(len(blocks.expert_G), triton.cdiv(num_inner, outputs))](
        x_TD, blocks.pairs_R, blocks.expert_G, fc1_EFD, x_TD if scale_EF is None else scale_EF, hidden_RI,
        num_in, num_inner, x_TD.stride(0),
        TOP_K=top_k, ROWS=blocks.rows_per_block, OUTPUTS=outputs, BLOCK=block,
        EVEN=num_in % block == 0 and num_inner % outputs == 0, HAS_SCALE=scale_EF is not None,
        num_warps=tuning.num_warps, num_stages=tuning.num_stages,
    )  # fmt: skip
    return hidden_RI


def _projected(
    hidden_RI: Tensor, num_pairs: int, blocks: Blocks, fc2_EDI: Tensor, scale_ED: Tensor | None, tuning: Tuning
) -> Tensor:
    """fc2 of every pair, in the order of the pairs."""
    _, num_out, num_inner = fc2_EDI.shape
    out_QD = torch.empty(num_pairs, num_out, dtype=hidden_RI.dtype, device=hidden_RI.device)
    block, outputs = _fitting(tuning.block_in, num_inner), _fitting(tuning.mix_outputs, num_out)
    _project_blocks[(len(blocks.expert_G), triton.cdiv(num_out, outputs))](
        hidden_RI, blocks.pairs_R, blocks.expert_G, fc2_EDI, hidden_RI if scale_ED is None else scale_ED, out_QD,
        num_inner, num_out,
        ROWS=blocks.rows_per_block, OUTPUTS=outputs, BLOCK=block,
        EVEN=num_inner % block == 0 and num_out % outputs == 0, HAS_SCALE=scale_ED is not None,
        num_warps=tuning.num_warps, num_stages=tuning.num_stages,
    )  # fmt: skip
    return out_QD


def _fitting(block: int, size: int) -> int:
    """A block no larger than the size needs, but large enough for the tensor cores."""
    return max(16, min(block, triton.next_power_of_2(size)))
