"""Mixture-of-experts MLP: the experts of each token, and their sum for few tokens or for many."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel.kernels.moe_mlp import Gate
from kestrel.kernels.triton.device_functions import gated
from kestrel.kernels.triton.launch import NO_TABLE, TuningTable, dependent, wait_for_inputs
from kestrel.kernels.triton.moe_grouped import moe_grouped

# ---------------------------------------------------------------------- routing
# The experts of each token: a program per token takes the largest score as often as needed.


@triton.jit
def _route(
    logits_ptr, weights_ptr, ids_ptr, num_experts, logits_stride,
    TOP_K: tl.constexpr, PADDED_K: tl.constexpr, BLOCK: tl.constexpr, OVER_ALL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    expert, place = tl.arange(0, BLOCK), tl.arange(0, PADDED_K)
    wait_for_inputs(DEPENDENT)
    scores = tl.load(logits_ptr + token * logits_stride + expert, mask=expert < num_experts, other=float("-inf"))
    scores = scores.to(tl.float32)
    largest = tl.max(scores, axis=0)
    if OVER_ALL:
        total = tl.sum(tl.exp(scores - largest), axis=0)
    weights = tl.zeros((PADDED_K,), dtype=tl.float32)
    ids = tl.zeros((PADDED_K,), dtype=tl.int64)
    for k in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
        top = tl.max(scores, axis=0)
        # Scores that are no numbers equal nothing: such a token, which nobody reads, still gets an expert that exists.
        chosen = tl.minimum(tl.min(tl.where(scores == top, expert, BLOCK), axis=0), num_experts - 1)
        weights = tl.where(place == k, tl.exp(top - largest), weights)
        ids = tl.where(place == k, chosen.to(tl.int64), ids)
        scores = tl.where(expert == chosen, float("-inf"), scores)
    if not OVER_ALL:
        total = tl.sum(weights, axis=0)
    weights /= total
    tl.store(weights_ptr + token * TOP_K + place, weights, mask=place < TOP_K)
    tl.store(ids_ptr + token * TOP_K + place, ids, mask=place < TOP_K)


def route_top_k(router_logits_TE: Tensor, k: int, *, over_all: bool = False) -> tuple[Tensor, Tensor]:
    """(weights [T, k] fp32, expert ids [T, k]), most likely expert first, of equals the first."""
    num_tokens, num_experts = router_logits_TE.shape
    assert 1 <= k <= num_experts
    assert router_logits_TE.stride(1) == 1
    weights_TK = torch.empty(num_tokens, k, dtype=torch.float32, device=router_logits_TE.device)
    ids_TK = torch.empty(num_tokens, k, dtype=torch.int64, device=router_logits_TE.device)
    if num_tokens > 0:
        _route[(num_tokens,)](
            router_logits_TE, weights_TK, ids_TK, num_experts, router_logits_TE.stride(0),
            TOP_K=k, PADDED_K=triton.next_power_of_2(k), BLOCK=triton.next_power_of_2(num_experts),
            OVER_ALL=over_all, num_warps=1, **dependent(),
        )  # fmt: skip
    return weights_TK, ids_TK


# ---------------------------------------------------------------------- few tokens
# Mixture-of-experts MLP for a few tokens: every pair of token and expert streams that expert's matrices by itself.
#
# Nothing is sorted and nothing is shared between tokens, which costs least while few tokens meet at one expert. The
# first kernel leaves the gated numbers of each pair, the second adds a token's experts up in fp32, in routing order.


@dataclass(frozen=True, slots=True)
class Tuning:
    gate_outputs: int = 1
    """Hidden numbers per program of the first kernel."""
    mix_outputs: int = 2
    """Results per program of the second."""
    max_block: int = 2048
    """Numbers of a matrix row read at a time."""
    num_warps: int = 4


@triton.jit
def _gate(
    x_ptr, ids_ptr, fc1_ptr, scale_ptr, hidden_ptr, num_in, num_inner, x_stride,
    TOP_K: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, HAS_SCALE: tl.constexpr,
    GATE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    pair = tl.program_id(1)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    i = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    first = expert * (2 * num_inner)
    h_place = fc1_ptr + (first + i)[:, None] * num_in
    g_place = fc1_ptr + (first + num_inner + i)[:, None] * num_in
    x_place = x_ptr + (pair // TOP_K).to(tl.int64) * x_stride
    h = tl.zeros((OUTPUTS, BLOCK), dtype=tl.float32)
    g = tl.zeros((OUTPUTS, BLOCK), dtype=tl.float32)
    for start in range(0, num_in, BLOCK):
        d = start + tl.arange(0, BLOCK)[None, :]
        if EVEN:
            x, w_h, w_g = tl.load(x_place + d), tl.load(h_place + d), tl.load(g_place + d)
        else:
            inside = (d < num_in) & (i < num_inner)[:, None]
            x = tl.load(x_place + d, mask=d < num_in, other=0.0)
            w_h, w_g = tl.load(h_place + d, mask=inside, other=0.0), tl.load(g_place + d, mask=inside, other=0.0)
        h += x.to(tl.float32) * w_h.to(tl.float32)
        g += x.to(tl.float32) * w_g.to(tl.float32)
    hidden, gate = tl.sum(h, axis=1), tl.sum(g, axis=1)
    if HAS_SCALE:
        hidden *= tl.load(scale_ptr + first + i, mask=i < num_inner, other=0.0)
        gate *= tl.load(scale_ptr + first + num_inner + i, mask=i < num_inner, other=0.0)
    out = gated(hidden, gate, GATE).to(hidden_ptr.dtype.element_ty)
    tl.store(hidden_ptr + pair * num_inner + i, out, mask=i < num_inner)


@triton.jit
def _mix(
    hidden_ptr, ids_ptr, weights_ptr, fc2_ptr, scale_ptr, y_ptr, num_inner, num_out, y_stride,
    TOP_K: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, HAS_SCALE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(1)
    f = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    total = tl.zeros((OUTPUTS, BLOCK), dtype=tl.float32)
    for k in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
        pair = token * TOP_K + k
        expert = tl.load(ids_ptr + pair).to(tl.int64)
        factor = tl.load(weights_ptr + pair) + tl.zeros((OUTPUTS, 1), dtype=tl.float32)
        if HAS_SCALE:
            factor *= tl.load(scale_ptr + expert * num_out + f, mask=f < num_out, other=0.0)[:, None]
        w_place = fc2_ptr + (expert * num_out + f)[:, None] * num_inner
        for start in range(0, num_inner, BLOCK):
            i = start + tl.arange(0, BLOCK)[None, :]
            if EVEN:
                w, hidden = tl.load(w_place + i), tl.load(hidden_ptr + pair * num_inner + i)
            else:
                w = tl.load(w_place + i, mask=(i < num_inner) & (f < num_out)[:, None], other=0.0)
                hidden = tl.load(hidden_ptr + pair * num_inner + i, mask=i < num_inner, other=0.0)
            total += (hidden.to(tl.float32) * factor) * w.to(tl.float32)
    y = tl.sum(total, axis=1).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + token.to(tl.int64) * y_stride + f, y, mask=f < num_out)


def moe_small(
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    fc1_EFD: Tensor,
    fc2_EDI: Tensor,
    fc1_scale_EF: Tensor | None = None,
    fc2_scale_ED: Tensor | None = None,
    tuning: Tuning | None = None,
    table: TuningTable = NO_TABLE,
    *,
    gate: Gate = "gelu",
) -> Tensor:
    """What `kestrel.kernels.moe_mlp.moe_mlp` gives; scales are those of matrices kept in float8, one per output."""
    num_tokens, num_in = x_TD.shape
    top_k, num_inner, num_out = ids_TK.shape[1], fc2_EDI.shape[2], fc2_EDI.shape[1]
    assert fc1_EFD.shape[1:] == (2 * num_inner, num_in)
    assert weights_TK.shape == ids_TK.shape == (num_tokens, top_k)
    assert x_TD.stride(1) == 1
    for tensor in (weights_TK, ids_TK, fc1_EFD, fc2_EDI, fc1_scale_EF, fc2_scale_ED):
        assert tensor is None or tensor.is_contiguous()
    y_TD = torch.empty(num_tokens, num_out, dtype=x_TD.dtype, device=x_TD.device)
    if num_tokens == 0:
        return y_TD
    dims = len(fc1_EFD), top_k, num_inner, num_in
    chosen = tuning or table.find("moe_small", num_tokens, dims, x_TD.dtype, fc1_EFD.dtype) or Tuning()
    hidden = torch.empty(num_tokens * top_k, num_inner, dtype=x_TD.dtype, device=x_TD.device)
    block = min(chosen.max_block, triton.next_power_of_2(num_in))
    _gate[(triton.cdiv(num_inner, chosen.gate_outputs), num_tokens * top_k)](
        x_TD, ids_TK, fc1_EFD, weights_TK if fc1_scale_EF is None else fc1_scale_EF, hidden,
        num_in, num_inner, x_TD.stride(0),
        TOP_K=top_k, OUTPUTS=chosen.gate_outputs, BLOCK=block,
        EVEN=num_in % block == 0 and num_inner % chosen.gate_outputs == 0, HAS_SCALE=fc1_scale_EF is not None,
        GATE=gate, num_warps=chosen.num_warps, **dependent(),
    )  # fmt: skip
    block = min(chosen.max_block, triton.next_power_of_2(num_inner))
    _mix[(triton.cdiv(num_out, chosen.mix_outputs), num_tokens)](
        hidden, ids_TK, weights_TK, fc2_EDI, weights_TK if fc2_scale_ED is None else fc2_scale_ED, y_TD,
        num_inner, num_out, num_out,
        TOP_K=top_k, OUTPUTS=chosen.mix_outputs, BLOCK=block,
        EVEN=num_inner % block == 0 and num_out % chosen.mix_outputs == 0, HAS_SCALE=fc2_scale_ED is not None,
        num_warps=chosen.num_warps, **dependent(),
    )  # fmt: skip
    return y_TD


# ---------------------------------------------------------------------- few tokens or many


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
    table: TuningTable = NO_TABLE,
    *,
    gate: Gate = "gelu",
) -> Tensor:
    """y [T, D] for routed tokens, by the version for their number."""
    run = moe_small if len(x_TD) <= FEW_TOKENS else moe_grouped
    return run(x_TD, weights_TK, ids_TK, fc1_EFD, fc2_EDI, fc1_scale_EF, fc2_scale_ED, table=table, gate=gate)
