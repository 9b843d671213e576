"""Grouped experts against one token and one expert at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kestrel.kernels.moe_mlp import expert_mlp, moe_mlp, route_top_k


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def token_by_token(
    x: Tensor, weights: Tensor, ids: Tensor, fc1: Tensor, fc2: Tensor, *, has_silu: bool = False
) -> Tensor:
    rows = []
    for t in range(x.shape[0]):
        row = torch.zeros(x.shape[1])
        for weight, expert in zip(weights[t], ids[t], strict=True):
            hidden, gate = (fc1[expert].float() @ x[t].float()).chunk(2)
            erf_gelu = 0.5 * hidden * (1.0 + torch.erf(hidden / 2**0.5))
            gated = hidden * torch.sigmoid(hidden) * gate if has_silu else erf_gelu * (gate + 1.0)
            row = row + weight * (fc2[expert].float() @ gated)
        rows.append(row)
    return torch.stack(rows)


def experts(num_experts: int, dim: int, inner: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    fc1 = torch.randn(num_experts, 2 * inner, dim, generator=generator) * dim**-0.5
    return fc1, torch.randn(num_experts, dim, inner, generator=generator) * inner**-0.5


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "k", "dim", "inner"),
    [(1, 1, 1, 4, 2), (1, 8, 3, 16, 8), (7, 8, 3, 16, 8), (64, 4, 4, 8, 5), (33, 64, 8, 12, 3)],
)
def test_grouping_by_expert_changes_nothing(num_tokens: int, num_experts: int, k: int, dim: int, inner: int) -> None:
    fc1, fc2 = experts(num_experts, dim, inner)
    x = torch.randn(num_tokens, dim)
    weights, ids = route_top_k(torch.randn(num_tokens, num_experts), k)
    expected = token_by_token(x, weights, ids, fc1, fc2)
    torch.testing.assert_close(moe_mlp(x, weights, ids, fc1, fc2), expected, rtol=1e-5, atol=1e-5)


def test_the_gate_may_be_that_of_silu() -> None:
    fc1, fc2 = experts(8, 16, 8)
    x = torch.randn(7, 16)
    weights, ids = route_top_k(torch.randn(7, 8), 3)
    expected = token_by_token(x, weights, ids, fc1, fc2, has_silu=True)
    torch.testing.assert_close(moe_mlp(x, weights, ids, fc1, fc2, gate="silu"), expected, rtol=1e-5, atol=1e-5)


def test_weights_over_all_experts_are_their_probabilities() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    weights, ids = route_top_k(logits, 2, over_all=True)
    assert ids.tolist() == [[1, 3]]
    torch.testing.assert_close(weights, logits.softmax(dim=1)[:, [1, 3]])


def test_routing_takes_the_largest_logits_and_their_own_softmax() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, -1.0, 5.5, 0.0]])
    weights, ids = route_top_k(logits, 2)
    assert ids.tolist() == [[1, 3], [2, 0]]
    torch.testing.assert_close(weights, torch.tensor([[3.0, 2.0], [5.5, 5.0]]).softmax(dim=1))


def test_half_precision_logits_are_weighted_in_fp32() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16)
    weights, _ = route_top_k(logits, 2)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(1))


def test_a_token_does_not_depend_on_the_order_of_the_batch() -> None:
    fc1, fc2 = experts(8, 16, 8)
    x, logits = torch.randn(40, 16), torch.randn(40, 8)
    weights, ids = route_top_k(logits, 3)
    shuffle = torch.randperm(40)
    together = moe_mlp(x, weights, ids, fc1, fc2)
    shuffled = moe_mlp(x[shuffle], weights[shuffle], ids[shuffle], fc1, fc2)
    torch.testing.assert_close(shuffled, together[shuffle], rtol=0.0, atol=1e-6)


def test_bfloat16_stays_close_to_fp32() -> None:
    fc1, fc2 = (w.to(torch.bfloat16) for w in experts(8, 16, 8))
    x = torch.randn(9, 16).to(torch.bfloat16)
    weights, ids = route_top_k(torch.randn(9, 8), 3)
    out = moe_mlp(x, weights, ids, fc1, fc2)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), token_by_token(x, weights, ids, fc1, fc2), rtol=2e-2, atol=3e-2)


def test_no_tokens_give_no_tokens() -> None:
    fc1, fc2 = experts(4, 8, 2)
    weights, ids = route_top_k(torch.empty(0, 4), 2)
    assert moe_mlp(torch.empty(0, 8), weights, ids, fc1, fc2).shape == (0, 8)


def test_gradients_reach_the_used_experts_only() -> None:
    fc1, fc2 = (w.requires_grad_() for w in experts(4, 8, 2))
    x = torch.randn(3, 8, requires_grad=True)
    ids = torch.tensor([[0, 2]] * 3)
    moe_mlp(x, torch.full((3, 2), 0.5), ids, fc1, fc2).sum().backward()
    assert fc1.grad is not None
    assert fc2.grad is not None
    assert x.grad is not None
    used = fc1.grad.abs().amax(dim=(1, 2)) > 0
    assert used.tolist() == [True, False, True, False]


def test_one_expert_gates_the_first_half_by_the_second() -> None:
    fc1 = torch.tensor([[2.0], [3.0]])
    out = expert_mlp(torch.tensor([[1.0]]), fc1, torch.tensor([[10.0]]))
    expected = torch.nn.functional.gelu(torch.tensor(2.0)) * 4.0 * 10.0
    assert out.item() == pytest.approx(expected.item(), rel=1e-6)
