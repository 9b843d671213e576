"""The choice of experts as a Triton kernel against the plain version."""

from __future__ import annotations

from tests.kernels.triton_mode import HALF, Draw, devices  # isort: skip - before any kernel

import pytest
import torch

from kestrel.kernels.moe_mlp import route_top_k as plain
from kestrel.kernels.triton.moe_mlp import route_top_k


@devices
@pytest.mark.parametrize("is_half", [False, True])
@pytest.mark.parametrize(
    ("tokens", "experts", "k"),
    [(1, 64, 8), (37, 64, 8), (5, 7, 3), (3, 4, 4), (2, 1, 1), (0, 8, 2)],
)
def test_experts_and_weights_are_those_of_the_plain_version(
    tokens: int, experts: int, k: int, is_half: bool, device: str
) -> None:
    # Distinct scores: which of two equals comes first is left open by the plain version.
    order = torch.stack([torch.randperm(experts) for _ in range(tokens)]) if tokens else torch.zeros(0, experts)
    logits = (order.to(device).float() / 4).to(HALF[device] if is_half else torch.float32)
    weights, ids = route_top_k(logits, k)
    expected_weights, expected_ids = plain(logits, k)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-6, atol=1e-7)


@devices
@pytest.mark.parametrize(("experts", "k"), [(128, 8), (7, 3), (4, 4)])
def test_weights_over_all_experts_are_those_of_the_plain_version(experts: int, k: int, device: str) -> None:
    logits = Draw(device)(3, experts)
    weights, ids = route_top_k(logits, k, over_all=True)
    expected_weights, expected_ids = plain(logits, k, over_all=True)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-6, atol=1e-7)


@devices
def test_of_equal_scores_the_first_experts_are_taken(device: str) -> None:
    weights, ids = route_top_k(torch.zeros(2, 6, device=device), 3)
    assert ids.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights.cpu(), torch.full((2, 3), 1 / 3))


@devices
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_token_without_numbers_gets_experts_that_exist(device: str) -> None:
    logits = Draw(device)(3, 10)
    logits[1] = float("nan")
    weights, ids = route_top_k(logits, 4)
    assert ids.min() >= 0
    assert ids.max() < 10
    expected_weights, expected_ids = plain(logits[[0, 2]], 4)
    assert torch.equal(ids[[0, 2]], expected_ids)
    torch.testing.assert_close(weights[[0, 2]], expected_weights)


@devices
def test_rows_may_lie_apart(device: str) -> None:
    wide = Draw(device)(4, 20)
    assert torch.equal(route_top_k(wide[:, 3:11], 2)[1], plain(wide[:, 3:11], 2)[1])
