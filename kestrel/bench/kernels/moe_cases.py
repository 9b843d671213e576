"""Mixtures of experts, for few tokens and for many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from kestrel.bench.kernels.case import Case, Maker
from kestrel.bench.kernels.sizes import Sizes
from kestrel.bench.kernels.tunings import moe_grouped_tunings, moe_small_tunings
from kestrel.bench.kernels.vision_cases import HALF_BYTES
from kestrel.kernels.moe_mlp import moe_mlp, route_top_k
from kestrel.kernels.triton.moe_grouped import moe_grouped
from kestrel.kernels.triton.moe_small import moe_small


def moe_cases(sizes: Sizes) -> Iterator[Case]:
    for tokens in sizes.few_rows:
        yield _case("moe_small", moe_small, sizes, tokens, moe_small_tunings())
    for tokens in sizes.routed_tokens:
        share = tokens * sizes.moe.experts_per_token / sizes.moe.num_experts
        yield _case("moe_grouped", moe_grouped, sizes, tokens, moe_grouped_tunings(share))


def _case(op: str, run: Callable[..., Tensor], sizes: Sizes, tokens: int, tunings: tuple[Any, ...]) -> Case:
    moe, dim = sizes.moe, sizes.text.dim
    num_experts, inner, top_k = moe.num_experts, moe.expert_inner_dim, moe.experts_per_token

    def make(maker: Maker) -> tuple[Tensor, ...]:
        fc1 = maker.numbers(num_experts, 2 * inner, dim, scale=dim**-0.5)
        fc2 = maker.numbers(num_experts, dim, inner, scale=inner**-0.5)
        weights, ids = route_top_k(maker.numbers(tokens, num_experts), top_k)
        return maker.numbers(tokens, dim), weights, ids, fc1, fc2

    per_expert = 3 * inner * dim
    # Random routing: an expert is touched unless every token passes it by.
    touched = num_experts * (1.0 - (1.0 - top_k / num_experts) ** tokens)
    return Case(
        op=op,
        size=f"{tokens} tokens, {top_k} of {num_experts} experts",
        plain=moe_mlp,
        triton=run,
        make=make,
        bytes_moved=int(touched * per_expert + 2 * tokens * dim) * HALF_BYTES,
        flop=2 * tokens * top_k * per_expert,
        tunings=tunings,
        is_plain_capturable=False,
    )
