"""The experts of each token: a program per token takes the largest score as often as needed."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel.kernels.triton.dependent_launch import dependent, wait_for_inputs


@triton.jit
def _route(
    logits_ptr, weights_ptr, ids_ptr, num_experts, logits_stride,
    TOP_K: tl.constexpr, PADDED_K: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    expert, place = tl.arange(0, BLOCK), tl.arange(0, PADDED_K)
    wait_for_inputs(DEPENDENT)
    scores = tl.load(logits_ptr + token * logits_stride + expert, mask=expert < num_experts, other=float("-inf"))
    scores = scores.to(tl.float32)
    largest = tl.max(scores, axis=0)
    weights = tl.zeros((PADDED_K,), dtype=tl.float32)
    ids = tl.zeros((PADDED_K,), dtype=tl.int64)
    for k in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
        top = tl.max(scores, axis=0)
        # Scores that are no numbers equal nothing: such a token, which nobody reads, still gets an expert that exists.
        chosen = tl.minimum(tl.min(tl.where(scores == top, expert, BLOCK), axis=0), num_experts - 1)
        weights = tl.where(place == k, tl.exp(top - largest), weights)
        ids = tl.where(place == k, chosen.to(tl.int64), ids)
        scores = tl.where(expert == chosen, float("-inf"), scores)
    weights /= tl.sum(weights, axis=0)
    tl.store(weights_ptr + token * TOP_K + place, weights, mask=place < TOP_K)
    tl.store(ids_ptr + token * TOP_K + place, ids, mask=place < TOP_K)


def route_top_k(router_logits_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(weights [T, k] fp32 summing to one, expert ids [T, k]), most likely expert first, of equals the first."""
    num_tokens, num_experts = router_logits_TE.shape
    assert 1 <= k <= num_experts
    assert router_logits_TE.stride(1) == 1
    weights_TK = torch.empty(num_tokens, k, dtype=torch.float32, device=router_logits_TE.device)
    ids_TK = torch.empty(num_tokens, k, dtype=torch.int64, device=router_logits_TE.device)
    if num_tokens > 0:
        _route[(num_tokens,)](
            router_logits_TE, weights_TK, ids_TK, num_experts, router_logits_TE.stride(0),
            TOP_K=k, PADDED_K=triton.next_power_of_2(k), BLOCK=triton.next_power_of_2(num_experts), num_warps=1,
            **dependent(),
        )  # fmt: skip
    return weights_TK, ids_TK
