"""Computing all experts gives what the engine's routed experts give, forwards and backwards."""

from __future__ import annotations

import pytest
import torch

from kestrel.kernels.moe_mlp import route_top_k
from kestrel.layers.mlp import Moe
from kestrel.train.objective import AllExpertsMlp, among_top


@pytest.mark.parametrize("k", [1, 2, 3])
def test_all_experts_equal_routed_experts(k: int) -> None:
    torch.manual_seed(k)
    routed = Moe(32, inner_dim=24, num_experts=8, experts_per_token=k).double()
    every = AllExpertsMlp(routed)
    x = torch.randn(50, 32, dtype=torch.float64, requires_grad=True)
    wanted, found = routed(x), every(x)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)
    weight = torch.randn_like(wanted)
    inputs = [x, *routed.parameters()]
    wanted_gradients = torch.autograd.grad((wanted * weight).sum(), inputs)
    found_gradients = torch.autograd.grad((found * weight).sum(), inputs)
    for mine, theirs in zip(found_gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_exactly_k_are_chosen_even_among_equals() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 2.0, 2.0, 2.0], [3.0, 1.0, 2.0, 0.0]])
    assert among_top(logits, 2).tolist() == [
        [True, True, False, False],
        [False, True, True, False],
        [True, False, True, False],
    ]


def test_the_choice_is_the_engines() -> None:
    logits = torch.randn(200, 8, generator=torch.Generator().manual_seed(1))
    _, ids = route_top_k(logits, 2)
    chosen = torch.zeros(200, 8, dtype=torch.bool).scatter_(1, ids, True)
    assert torch.equal(among_top(logits, 2), chosen)


def test_balance_is_one_when_even_and_larger_when_not() -> None:
    routed = Moe(8, inner_dim=4, num_experts=4, experts_per_token=1)
    every = AllExpertsMlp(routed)
    with torch.no_grad():
        routed.router.weight.zero_()
        routed.router.weight[:, :4] = 20.0 * torch.eye(4)
        routed.router.bias.zero_()
    every(torch.eye(8)[:4])
    assert every.balance is not None
    assert every.balance.item() == pytest.approx(1.0, abs=1e-3)
    every(torch.eye(8)[:1].expand(4, -1))
    assert every.balance.item() == pytest.approx(4.0, abs=1e-3)
