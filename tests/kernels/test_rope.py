"""Rotary embedding against its formula, one pair at a time."""

from __future__ import annotations

import math

import pytest
import torch

from kestrel.kernels.rotary import apply_rope, rope_tables


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("theta", [10000.0, 1_500_000.0])
@pytest.mark.parametrize("rotary_dim", [2, 6, 32])
def test_tables_hold_the_angles_of_the_formula(rotary_dim: int, theta: float) -> None:
    cos, sin = rope_tables(5, rotary_dim, theta, "cpu")
    assert cos.shape == sin.shape == (5, rotary_dim // 2)
    assert cos.dtype == sin.dtype == torch.float32
    for position in range(5):
        for j in range(rotary_dim // 2):
            angle = position * theta ** (-2 * j / rotary_dim)
            assert cos[position, j].item() == pytest.approx(math.cos(angle), abs=1e-6)
            assert sin[position, j].item() == pytest.approx(math.sin(angle), abs=1e-6)


@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "head_dim", "rotary_dim"), [(1, 1, 2, 2), (3, 2, 64, 32), (5, 3, 7, 6)]
)
def test_half_split_pairs_rotate_and_the_rest_passes(
    num_tokens: int, num_heads: int, head_dim: int, rotary_dim: int
) -> None:
    x = torch.randn(num_tokens, num_heads, head_dim)
    cos, sin = rope_tables(num_tokens, rotary_dim, 100.0, "cpu")
    rotated = apply_rope(x, cos, sin)
    half = rotary_dim // 2
    for t in range(num_tokens):
        for j in range(half):
            pair = torch.complex(x[t, :, j], x[t, :, half + j]) * torch.complex(cos[t, j], sin[t, j])
            torch.testing.assert_close(rotated[t, :, j], pair.real)
            torch.testing.assert_close(rotated[t, :, half + j], pair.imag)
    assert torch.equal(rotated[:, :, rotary_dim:], x[:, :, rotary_dim:])


def test_scores_depend_only_on_the_distance_of_positions() -> None:
    q, k = torch.randn(1, 1, 8), torch.randn(1, 1, 8)
    cos, sin = rope_tables(100, 8, 10000.0, "cpu")

    def score(q_position: int, k_position: int) -> torch.Tensor:
        q_rotated = apply_rope(q, cos[[q_position]], sin[[q_position]])
        return (q_rotated * apply_rope(k, cos[[k_position]], sin[[k_position]])).sum()

    torch.testing.assert_close(score(30, 10), score(90, 70))


def test_half_precision_is_rotated_in_fp32_and_rounded_once() -> None:
    x = torch.randn(4, 2, 8).to(torch.bfloat16)
    cos, sin = rope_tables(4, 8, 10000.0, "cpu")
    rotated = apply_rope(x, cos, sin)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, apply_rope(x.float(), cos, sin).to(torch.bfloat16))


def test_no_tokens_give_no_tokens() -> None:
    cos, sin = rope_tables(0, 4, 10000.0, "cpu")
    assert apply_rope(torch.empty(0, 2, 8), cos, sin).shape == (0, 2, 8)
