"""Tau factors in one launch for a few tokens and in two for many.

A few tokens: a program takes one token and a few outputs, and adds products lane by lane; lanes meet once, at the end.
Many: blocks of tokens and outputs go through the tensor cores, and programs share out the features among them, so that
all multiprocessors work; a second kernel adds their sums. Features are made from qkv as it is loaded, in either case,
and sums stay fp32 up to the tanh.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel.kernels.triton.activations import gelu_erf, tanh
from kestrel.kernels.triton.tuning_table import NO_TABLE, TuningTable

SUMMED_TOKENS = 16
ADDED_TOKENS = 4
"""Tokens of a program that adds the sums of others."""


@dataclass(frozen=True, slots=True)
class SumTuning:
    """For a few tokens."""

    block_out: int
    block_in: int = 2048
    num_warps: int = 8

    @classmethod
    def of(cls, num_tokens: int, num_out: int) -> SumTuning:
        """Up to some 256 programs. Each output more in a program spares its token another round of features."""
        return cls(block_out=min(8, max(1, triton.next_power_of_2(num_tokens * num_out) // 256)))


@dataclass(frozen=True, slots=True)
class DotTuning:
    """For many tokens."""

    block_tokens: int = 64
    block_out: int = 64
    block_in: int = 64
    target_programs: int = 256
    num_warps: int = 4
    num_stages: int = 3

    def features_per_program(self, num_blocks: int, num_features: int) -> int:
        """A multiple of `block_in`, and at least two of them."""
        splits = max(1, self.target_programs // num_blocks)
        return max(2, triton.cdiv(num_features, splits * self.block_in)) * self.block_in


@triton.jit
def _features(qkv):
    """GELU in fp32, rounded to the dtype of qkv."""
    return gelu_erf(qkv.to(tl.float32)).to(qkv.dtype)


@triton.jit
def _finish(total, tokens, outs, inside, alpha_ptr, positions_ptr, tau_ptr, num_tokens, num_heads):
    """tanh(total) + p_h, stored as [2, T, H]; outputs are the heads of queries, then those of values."""
    heads = outs % num_heads
    alpha = tl.load(alpha_ptr + heads).to(tl.float32)
    position = tl.load(positions_ptr + tokens, mask=tokens < num_tokens, other=0).to(tl.float32)
    by_position = 0.5 + 1.0 / (1.0 + tl.exp(tl.minimum(-alpha * tl.log(position + 1.0), 80.0)))
    place = (outs // num_heads * num_tokens + tokens) * num_heads + heads
    tl.store(tau_ptr + place, tanh(total) + by_position, mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _by_sums(
    qkv_ptr, w_ptr, alpha_ptr, positions_ptr, tau_ptr, num_tokens, num_heads, qkv_stride,
    FEATURES: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1)
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)[:, None]
    qkv_place = qkv_ptr + token.to(tl.int64) * qkv_stride
    total = tl.zeros((BLOCK_OUT, BLOCK_IN), dtype=tl.float32)
    # Unrolled, so that all loads are under way before the first is needed.
    for start in tl.static_range(0, FEATURES, BLOCK_IN):
        d = start + tl.arange(0, BLOCK_IN)[None, :]
        if EVEN:
            qkv, w = tl.load(qkv_place + d), tl.load(w_ptr + outs * FEATURES + d)
        else:
            qkv = tl.load(qkv_place + d, mask=d < FEATURES, other=0.0)
            w = tl.load(w_ptr + outs * FEATURES + d, mask=(outs < 2 * num_heads) & (d < FEATURES), other=0.0)
        total += _features(qkv).to(tl.float32) * w.to(tl.float32)
    _finish(
        tl.sum(total, axis=1)[:, None], token, outs, outs < 2 * num_heads,
        alpha_ptr, positions_ptr, tau_ptr, num_tokens, num_heads,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def _by_dots(
    qkv_ptr, w_ptr, sums_ptr, num_tokens, num_out, num_features, qkv_stride, features_per_program,
    BLOCK_TOKENS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    outs = tl.program_id(2) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    first = tl.program_id(1) * features_per_program
    total = tl.zeros((BLOCK_TOKENS, BLOCK_OUT), dtype=tl.float32)
    qkv_place = qkv_ptr + tokens.to(tl.int64)[:, None] * qkv_stride
    w_place = w_ptr + outs[None, :] * num_features
    for start in range(first, tl.minimum(first + features_per_program, num_features), BLOCK_IN):
        d = start + tl.arange(0, BLOCK_IN)
        if EVEN:
            qkv = tl.load(qkv_place + d[None, :], mask=(tokens < num_tokens)[:, None], other=0.0)
            w = tl.load(w_place + d[:, None])
        else:
            inside = d < num_features
            qkv = tl.load(qkv_place + d[None, :], mask=(tokens < num_tokens)[:, None] & inside[None, :], other=0.0)
            w = tl.load(w_place + d[:, None], mask=(outs < num_out)[None, :] & inside[:, None], other=0.0)
        total = tl.dot(_features(qkv), w, total, input_precision="ieee")
    place = (tl.program_id(1) * num_tokens + tokens)[:, None] * num_out + outs[None, :]
    tl.store(sums_ptr + place, total, mask=(tokens < num_tokens)[:, None] & (outs < num_out)[None, :])


@triton.jit(do_not_specialize=["num_tokens", "num_splits"])
def _add_splits(
    sums_ptr, alpha_ptr, positions_ptr, tau_ptr, num_tokens, num_heads, num_splits,
    BLOCK_TOKENS: tl.constexpr, BLOCK_OUT: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)[:, None]
    outs = tl.arange(0, BLOCK_OUT)[None, :]
    inside = (tokens < num_tokens) & (outs < 2 * num_heads)
    total = tl.zeros((BLOCK_TOKENS, BLOCK_OUT), dtype=tl.float32)
    for split in range(num_splits):
        total += tl.load(sums_ptr + (split * num_tokens + tokens) * 2 * num_heads + outs, mask=inside, other=0.0)
    _finish(total, tokens, outs, inside, alpha_ptr, positions_ptr, tau_ptr, num_tokens, num_heads)


def tau_factors(
    qkv_TF: Tensor,
    w_2HF: Tensor,
    alpha_H: Tensor,
    positions_T: Tensor,
    tuning: SumTuning | DotTuning | None = None,
    table: TuningTable = NO_TABLE,
) -> tuple[Tensor, Tensor]:
    """(tau_q, tau_v), each [T, H], fp32; `w_2HF` is cat(wq, wv). Rows of qkv may lie apart."""
    (num_tokens, num_features), num_heads = qkv_TF.shape, alpha_H.shape[0]
    assert w_2HF.shape == (2 * num_heads, num_features)
    assert w_2HF.dtype is qkv_TF.dtype
    assert positions_T.shape == (num_tokens,)
    assert qkv_TF.stride(1) == 1
    for tensor in (w_2HF, alpha_H, positions_T):
        assert tensor.is_contiguous()
    tau_2TH = torch.empty(2, num_tokens, num_heads, dtype=torch.float32, device=qkv_TF.device)
    if num_tokens > 0:
        by_sums = num_tokens <= SUMMED_TOKENS
        found = tuning or table.find("tau_factors", num_tokens, (2 * num_heads, num_features), qkv_TF.dtype)
        chosen = found or (SumTuning.of(num_tokens, 2 * num_heads) if by_sums else DotTuning())
        launch = _launch_sums if isinstance(chosen, SumTuning) else _launch_dots
        launch(qkv_TF, w_2HF, alpha_H, positions_T, tau_2TH, chosen)
    return tau_2TH[0], tau_2TH[1]


def _launch_sums(
    qkv_TF: Tensor, w_2HF: Tensor, alpha_H: Tensor, positions_T: Tensor, tau_2TH: Tensor, chosen: SumTuning
) -> None:
    (num_tokens, num_features), num_out = qkv_TF.shape, w_2HF.shape[0]
    block_in = min(chosen.block_in, triton.next_power_of_2(num_features))
    _by_sums[(triton.cdiv(num_out, chosen.block_out), num_tokens)](
        qkv_TF, w_2HF, alpha_H, positions_T, tau_2TH, num_tokens, num_out // 2, qkv_TF.stride(0),
        FEATURES=num_features, BLOCK_OUT=chosen.block_out, BLOCK_IN=block_in,
        EVEN=num_features % block_in == 0 and num_out % chosen.block_out == 0, num_warps=chosen.num_warps,
    )  # fmt: skip


def _launch_dots(
    qkv_TF: Tensor, w_2HF: Tensor, alpha_H: Tensor, positions_T: Tensor, tau_2TH: Tensor, chosen: DotTuning
) -> None:
    (num_tokens, num_features), num_out = qkv_TF.shape, w_2HF.shape[0]
    token_blocks, out_blocks = triton.cdiv(num_tokens, chosen.block_tokens), triton.cdiv(num_out, chosen.block_out)
    per_program = chosen.features_per_program(token_blocks * out_blocks, num_features)
    splits = triton.cdiv(num_features, per_program)
    sums_STO = torch.empty(splits, num_tokens, num_out, dtype=torch.float32, device=qkv_TF.device)
    _by_dots[(token_blocks, splits, out_blocks)](
        qkv_TF, w_2HF, sums_STO, num_tokens, num_out, num_features, qkv_TF.stride(0), per_program,
        BLOCK_TOKENS=chosen.block_tokens, BLOCK_OUT=chosen.block_out, BLOCK_IN=chosen.block_in,
        EVEN=num_features % chosen.block_in == 0 and num_out % chosen.block_out == 0,
        num_warps=chosen.num_warps, num_stages=chosen.num_stages,
    )  # fmt: skip
    _add_splits[(triton.cdiv(num_tokens, ADDED_TOKENS),)](
        sums_STO, alpha_H, positions_T, tau_2TH, num_tokens, num_out // 2, splits,
        BLOCK_TOKENS=ADDED_TOKENS, BLOCK_OUT=triton.next_power_of_2(num_out), num_warps=2,
    )  # fmt: skip
