"""Mixtures of experts, for few tokens and for many, with matrices as they are and in float8."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from kestrel.bench.kernels.case import Case, Maker
from kestrel.bench.kernels.sizes import Sizes
from kestrel.bench.kernels.tunings import moe_fp8_tunings, moe_grouped_tunings, moe_small_tunings
from kestrel.bench.kernels.vision_cases import FP8_BYTES, HALF_BYTES
from kestrel.kernels.fp8_linear import weights_to_fp8
from kestrel.kernels.moe_mlp import moe_mlp, moe_mlp_fp8, route_top_k
from kestrel.kernels.triton.moe_grouped import moe_grouped, moe_grouped_fp8
from kestrel.kernels.triton.moe_small import moe_small
from kestrel.layers.mlp import MAX_EXACT_ROWS


def moe_cases(sizes: Sizes) -> Iterator[Case]:
    for tokens in sizes.few_rows:
        for has_fp8_experts in (False, True):
            yield _case("moe_small", moe_small, sizes, tokens, moe_small_tunings(), has_fp8_experts)
    for tokens in sizes.routed_tokens:
        share = tokens * sizes.moe.experts_per_token / sizes.moe.num_experts
        yield _case("moe_grouped", moe_grouped, sizes, tokens, moe_grouped_tunings(share))
        narrow = moe_fp8_tunings(share)
        if tokens <= MAX_EXACT_ROWS:
            yield _case("moe_grouped", moe_grouped, sizes, tokens, narrow, has_fp8_experts=True)
        else:
            case = _case("moe_grouped_fp8", moe_grouped_fp8, sizes, tokens, narrow, has_fp8_experts=True)
            yield replace(case, plain=moe_mlp_fp8, gives_fp8=True)


def _case(
    op: str,
    run: Callable[..., Tensor],
    sizes: Sizes,
    tokens: int,
    tunings: tuple[Any, ...],
    has_fp8_experts: bool = False,
) -> Case:
    moe, dim = sizes.moe, sizes.text.dim
    num_experts, inner, top_k = moe.num_experts, moe.expert_inner_dim, moe.experts_per_token

    def make(maker: Maker) -> tuple[Tensor, ...]:
        fc1 = maker.numbers(num_experts, 2 * inner, dim, scale=dim**-0.5)
        fc2 = maker.numbers(num_experts, dim, inner, scale=inner**-0.5)
        weights, ids = route_top_k(maker.numbers(tokens, num_experts), top_k)
        x = maker.numbers(tokens, dim)
        if not has_fp8_experts:
            return x, weights, ids, fc1, fc2
        (fc1, fc1_scale), (fc2, fc2_scale) = _narrowed(fc1), _narrowed(fc2)
        return x, weights, ids, fc1, fc2, fc1_scale, fc2_scale

    per_expert = 3 * inner * dim
    # Random routing: an expert is touched unless every token passes it by.
    touched = num_experts * (1.0 - (1.0 - top_k / num_experts) ** tokens)
    expert_bytes = touched * per_expert * (FP8_BYTES if has_fp8_experts else HALF_BYTES)
    return Case(
        op=op,
        size=f"{tokens} tokens, {top_k} of {num_experts} experts{', fp8' * has_fp8_experts}",
        plain=moe_mlp,
        triton=run,
        make=make,
        bytes_moved=int(expert_bytes) + 2 * tokens * dim * HALF_BYTES,
        flop=2 * tokens * top_k * per_expert,
        tunings=tunings,
        is_plain_capturable=False,
    )


def _narrowed(matrices_EFD: Tensor) -> tuple[Tensor, Tensor]:
    """In float8, and a scale for each row of each expert."""
    numbers, scale = weights_to_fp8(matrices_EFD.flatten(0, 1))
    return numbers.view(matrices_EFD.shape), scale.view(matrices_EFD.shape[:2])
