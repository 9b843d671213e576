"""Tau factors, and scaling, rotation and storing of a fused projection."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel.kernels.fp8 import LARGEST_FP8
from kestrel.kernels.triton.device_functions import gelu_erf, tanh
from kestrel.kernels.triton.launch import NO_TABLE, TuningTable, dependent, wait_for_inputs
from kestrel.kernels.triton.paged_attention import page_layout

# ---------------------------------------------------------------------- tau
# Tau factors in one launch for a few tokens and in two for many.
#
# A few tokens: a program takes one token and a few outputs, and adds products lane by lane; lanes meet once, at the
# end. Many: blocks of tokens and outputs go through the tensor cores, and programs share out the features among them,
# so that all multiprocessors work; a second kernel adds their sums. Features are made from qkv as it is loaded, in
# either case, and sums stay fp32 up to the tanh.


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
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
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
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
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
    BLOCK_TOKENS: tl.constexpr, BLOCK_OUT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(DEPENDENT)
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
        **dependent(),
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
        num_warps=chosen.num_warps, num_stages=chosen.num_stages, **dependent(),
    )  # fmt: skip
    _add_splits[(triton.cdiv(num_tokens, ADDED_TOKENS),)](
        sums_STO, alpha_H, positions_T, tau_2TH, num_tokens, num_out // 2, splits,
        BLOCK_TOKENS=ADDED_TOKENS, BLOCK_OUT=triton.next_power_of_2(num_out), num_warps=2, **dependent(),
    )  # fmt: skip


# ---------------------------------------------------------------------- rotate and store
# Scaling, rotation and storing of a fused projection in one pass.
#
# A program takes one token and a block of its q, k and v heads, which lie one after another. Each number is read
# together with its partner in the rotation; dimensions that do not rotate have cosine 1 and sine 0.


MANY_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class RotateTuning:
    heads_per_program: int = 8
    num_warps: int = 2

    @classmethod
    def of(cls, num_tokens: int, head_dim: int) -> RotateTuning:
        """Many tokens: a program for all heads of one, if they are narrow."""
        if num_tokens < MANY_TOKENS:
            return cls(num_warps=4)
        return cls(heads_per_program=64 if head_dim <= 64 else 16)


@triton.jit
def for_cache(x, inverse_scale, LIMIT: tl.constexpr, DTYPE: tl.constexpr):
    if tl.float8e4nv == DTYPE:
        x = tl.clamp(x.to(tl.float32) * inverse_scale, -LIMIT, LIMIT)
    return x.to(DTYPE)


@triton.jit
def _normed(x, per_deviation, q_norm_ptr, k_norm_ptr, at, inside, is_query, is_value):
    """The RMS norm of queries and keys, rounded before and after the weight; values as they are."""
    weight = tl.load(q_norm_ptr + at, mask=inside & is_query, other=0.0)
    weight += tl.load(k_norm_ptr + at, mask=inside & (~is_query) & (~is_value), other=0.0)
    normed = (x.to(tl.float32) * per_deviation).to(x.dtype).to(tl.float32) * weight.to(tl.float32)
    return tl.where(is_value, x, normed.to(x.dtype))


@triton.jit
def _rotate_and_store(
    qkv_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, tau_q_ptr, tau_v_ptr, q_norm_ptr, k_norm_ptr, q_ptr,
    k_cache_ptr, v_cache_ptr, qkv_stride, inverse_k_scale, inverse_v_scale, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    HAS_TAU: tl.constexpr, HAS_NORMS: tl.constexpr, BLOCK_HEADS: tl.constexpr, DIMS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, POSITION_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    LARGEST: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    d = tl.arange(0, DIMS)[None, :]
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    inside = (head < HEADS + 2 * KV_HEADS) & (d < HEAD_DIM)
    rotates = (d < 2 * HALF) & (head < HEADS + KV_HEADS)
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    source = qkv_ptr + token * qkv_stride + head * HEAD_DIM
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if HALF > 0:
        table = tl.load(positions_ptr + token).to(tl.int64) * HALF + d % HALF
        cos = tl.load(cos_ptr + table, mask=rotates, other=1.0)
        sin = tl.load(sin_ptr + table, mask=rotates, other=0.0)
    wait_for_inputs(DEPENDENT)
    x = tl.load(source + d, mask=inside, other=0.0)
    other = tl.load(source + partner, mask=rotates, other=0.0)
    if HAS_TAU:
        tau_q = tl.load(tau_q_ptr + token * HEADS + head, mask=is_query, other=1.0)
        tau_v = tl.load(
            tau_v_ptr + token * KV_HEADS + (head - HEADS - KV_HEADS),
            mask=is_value & (head < HEADS + 2 * KV_HEADS),
            other=1.0,
        )
        factor = tau_q * tau_v
        x = (x.to(tl.float32) * factor).to(x.dtype)
        other = (other.to(tl.float32) * factor).to(x.dtype)
    if HAS_NORMS:
        wide = x.to(tl.float32)
        per_deviation = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=1) / HEAD_DIM + eps)[:, None]
        x = _normed(x, per_deviation, q_norm_ptr, k_norm_ptr, d, d < HEAD_DIM, is_query, is_value)
        other = _normed(other, per_deviation, q_norm_ptr, k_norm_ptr, partner, rotates, is_query, is_value)
    if HALF > 0:
        signed = tl.where(d < HALF, -sin, sin)
        x = (x.to(tl.float32) * cos + other.to(tl.float32) * signed).to(x.dtype)
    tl.store(q_ptr + token * (HEADS * HEAD_DIM) + head * HEAD_DIM + d, x, mask=inside & is_query)
    k_place = slot // PAGE_SIZE * PAGE_STRIDE + slot % PAGE_SIZE * POSITION_STRIDE + (head - HEADS) * HEAD_STRIDE + d
    k = for_cache(x, inverse_k_scale, LARGEST, k_cache_ptr.dtype.element_ty)
    tl.store(k_cache_ptr + k_place, k, mask=inside & (head >= HEADS) & (head < HEADS + KV_HEADS))
    v = for_cache(x, inverse_v_scale, LARGEST, v_cache_ptr.dtype.element_ty)
    tl.store(v_cache_ptr + k_place - KV_HEADS * HEAD_STRIDE, v, mask=inside & is_value)


def rotate_and_store(
    qkv_TF: Tensor,
    n_heads: int,
    n_kv_heads: int,
    cos_table: Tensor | None,
    sin_table: Tensor | None,
    positions_T: Tensor,
    slots_T: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tau: tuple[Tensor, Tensor] | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    norms: tuple[Tensor, Tensor, float] | None = None,
    tuning: RotateTuning | None = None,
    table: TuningTable = NO_TABLE,
) -> Tensor:
    """q [T, heads, head_dim], contiguous. Rows of `qkv_TF` may lie apart, as the columns of a wider projection do."""
    num_tokens, width = qkv_TF.shape
    num_all_heads = n_heads + 2 * n_kv_heads
    head_dim = width // num_all_heads
    assert width == num_all_heads * head_dim
    assert k_cache.shape == v_cache.shape == (*k_cache.shape[:2], n_kv_heads, head_dim)
    assert cos_table is None or (sin_table is not None and cos_table.shape == sin_table.shape)
    assert qkv_TF.stride(1) == 1
    for tensor in (cos_table, sin_table, positions_T, slots_T, *(tau or ())):
        assert tensor is None or tensor.is_contiguous()
    q_THD = torch.empty(num_tokens, n_heads, head_dim, dtype=qkv_TF.dtype, device=qkv_TF.device)
    if num_tokens == 0:
        return q_THD
    dims = n_heads, n_kv_heads, head_dim
    found = tuning or table.find("rotate_and_store", num_tokens, dims, qkv_TF.dtype)
    chosen = found or RotateTuning.of(num_tokens, dims[-1])
    tau_q, tau_v = tau or (positions_T, positions_T)
    q_norm_D, k_norm_D, eps = norms or (qkv_TF, qkv_TF, 0.0)
    _rotate_and_store[(num_tokens, triton.cdiv(num_all_heads, chosen.heads_per_program))](
        qkv_TF, positions_T if cos_table is None else cos_table, positions_T if sin_table is None else sin_table,
        positions_T, slots_T, tau_q, tau_v, q_norm_D, k_norm_D, q_THD, k_cache, v_cache,
        qkv_TF.stride(0), 1.0 / k_scale, 1.0 / v_scale, eps,
        HEADS=n_heads, KV_HEADS=n_kv_heads, HEAD_DIM=head_dim, HALF=0 if cos_table is None else cos_table.shape[1],
        HAS_TAU=tau is not None, HAS_NORMS=norms is not None, BLOCK_HEADS=chosen.heads_per_program,
        DIMS=triton.next_power_of_2(head_dim),
        LARGEST=LARGEST_FP8, **page_layout(k_cache, v_cache), num_warps=chosen.num_warps, **dependent(),
    )  # fmt: skip
    return q_THD
