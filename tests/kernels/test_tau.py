"""Tau factors against their formula, one head and token at a time."""

from __future__ import annotations

import math

import pytest
import torch

from kestrel.kernels.rotary import scale_heads, tau_factors, tau_position


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def erf_gelu(x: float) -> float:
    return 0.5 * x * (1.0 + math.erf(x / math.sqrt(2.0)))


def test_position_part_starts_at_one_and_follows_the_logarithm() -> None:
    alpha = torch.tensor([0.0, 1.0, -2.0])
    factors = tau_position(alpha, torch.tensor([0, 7, 32767]))
    assert factors[0].tolist() == [1.0, 1.0, 1.0]
    for row, position in ((1, 7), (2, 32767)):
        for head in range(3):
            expected = 0.5 + 1.0 / (1.0 + math.exp(-alpha[head].item() * math.log(position + 1)))
            assert factors[row, head].item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("num_tokens", "num_heads", "qkv_dim"), [(1, 1, 1), (3, 2, 6), (4, 3, 5)])
def test_factors_match_the_formula(num_tokens: int, num_heads: int, qkv_dim: int) -> None:
    qkv, wq, wv = torch.randn(num_tokens, qkv_dim), torch.randn(num_heads, qkv_dim), torch.randn(num_heads, qkv_dim)
    alpha, positions = torch.randn(num_heads), torch.arange(730, 730 + num_tokens)
    tau_q, tau_v = tau_factors(qkv, wq, wv, alpha, positions)
    by_position = tau_position(alpha, positions)
    for t in range(num_tokens):
        features = [erf_gelu(value) for value in qkv[t].tolist()]
        for h in range(num_heads):
            for weights, factors in ((wq, tau_q), (wv, tau_v)):
                dot = sum(w * f for w, f in zip(weights[h].tolist(), features, strict=True))
                assert factors[t, h].item() == pytest.approx(math.tanh(dot) + by_position[t, h].item(), abs=1e-5)


def test_positions_beyond_half_precision_stay_distinct() -> None:
    alpha = torch.tensor([1.0], dtype=torch.bfloat16)
    qkv, w = torch.zeros(2, 4, dtype=torch.bfloat16), torch.zeros(1, 4, dtype=torch.bfloat16)
    tau_q, _ = tau_factors(qkv, w, w, alpha, torch.tensor([1000, 1001]))
    assert tau_q.dtype == torch.float32
    assert tau_q[0, 0] != tau_q[1, 0]


def test_heads_are_scaled_in_fp32_and_keep_their_dtype() -> None:
    x, factors = torch.randn(3, 2, 4).to(torch.bfloat16), torch.rand(3, 2) + 0.5
    scaled = scale_heads(x, factors)
    assert torch.equal(scaled, (x.float() * factors[:, :, None]).to(torch.bfloat16))
