"""Tau factors as Triton kernels against the plain version."""

from __future__ import annotations

from tests.kernels.triton_mode import HALF, Draw, devices, distance  # isort: skip - before any kernel

import pytest
import torch

from kestrel.kernels.rotary import stacked_tau_factors as plain
from kestrel.kernels.triton.rotary import DotTuning, SumTuning, tau_factors

MANY_HEADS = 32 if torch.cuda.is_available() else 5
"""In the interpreter each head of a token is two programs."""
SHAPES = [
    (1, MANY_HEADS, 6144),
    (3, 3, 100),
    (16, 1, 33),
    (17, 3, 100),
    (70, 32, 192),
    (65, 40, 320),
    (40, 1, 5),
    (2, 1, 1),
]
TUNINGS = [SumTuning(1, 64, 1), SumTuning(8, 2048, 4), DotTuning(), DotTuning(16, 16, 32, target_programs=1)]

Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def drawn(shape: tuple[int, int, int], device: str, dtype: torch.dtype = torch.float32) -> Given:
    num_tokens, num_heads, num_features = shape
    draw = Draw(device, dtype)
    qkv, w = draw(num_tokens, num_features, scale=2.0), draw(2 * num_heads, num_features, scale=num_features**-0.5)
    return qkv, w, draw(num_heads), draw.integers(32768, num_tokens)


@devices
@pytest.mark.parametrize("shape", SHAPES)
def test_factors_are_those_of_the_plain_version(shape: tuple[int, int, int], device: str) -> None:
    qkv, w, alpha, positions = drawn(shape, device)
    got = tau_factors(qkv, w, alpha, positions)
    expected = plain(qkv.double(), w.double(), alpha, positions)
    for factors, exact in zip(got, expected, strict=True):
        assert factors.dtype is torch.float32
        torch.testing.assert_close(factors, exact.float(), rtol=1e-5, atol=1e-5)


@devices
@pytest.mark.parametrize("num_tokens", [1, 30])
def test_large_sums_and_far_positions_end_at_the_limits_of_tanh_and_sigmoid(num_tokens: int, device: str) -> None:
    qkv = torch.full((num_tokens, 64), 100.0, device=device)
    w = torch.tensor([1.0, -1.0], device=device)[:, None].expand(2, 64).contiguous()
    positions = torch.full((num_tokens,), 32767, device=device)
    tau_q, tau_v = tau_factors(qkv, w, torch.tensor([-50.0], device=device), positions)
    assert tau_q.tolist() == [[1.5]] * num_tokens
    assert tau_v.tolist() == [[-0.5]] * num_tokens


@devices
@pytest.mark.parametrize("tuning", TUNINGS)
def test_how_the_work_is_shared_out_changes_nothing(tuning: SumTuning | DotTuning, device: str) -> None:
    given = drawn((4, 5, 150), device)
    for factors, expected in zip(tau_factors(*given, tuning=tuning), plain(*given), strict=True):
        torch.testing.assert_close(factors, expected, rtol=1e-5, atol=1e-5)


@devices
@pytest.mark.parametrize("num_tokens", [0, 2, 40])
def test_rows_may_be_columns_of_a_wider_tensor(num_tokens: int, device: str) -> None:
    wide, w, alpha, positions = drawn((num_tokens, 4, 96), device)
    columns, narrow = wide[:, 32:], w[:, :64].contiguous()
    got = tau_factors(columns, narrow, alpha, positions)
    expected = tau_factors(columns.contiguous(), narrow, alpha, positions)
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))
    assert got[0].shape == (num_tokens, 4)


@devices
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_half_precision_is_no_further_from_the_truth_than_the_plain_version(num_tokens: int, device: str) -> None:
    # So many heads that the distances, which come from rounding, are those of a large sample.
    qkv, w, alpha, positions = drawn((num_tokens, 64, 512), device, HALF[device])
    exact = plain(qkv.double(), w.double(), alpha, positions)
    got, simple = tau_factors(qkv, w, alpha, positions), plain(qkv, w, alpha, positions)
    for mine, other, truth in zip(got, simple, exact, strict=True):
        assert distance(mine, truth) <= 1.05 * distance(other, truth)


@pytest.mark.parametrize(("num_blocks", "num_programs"), [(1, 48), (12, 240), (47, 235), (1000, 1000)])
def test_features_are_shared_out_so_that_all_multiprocessors_work(num_blocks: int, num_programs: int) -> None:
    per_program = DotTuning().features_per_program(num_blocks, 6144)
    assert per_program % DotTuning().block_in == 0
    assert num_blocks * -(-6144 // per_program) == num_programs


@pytest.mark.parametrize(("num_tokens", "block_out"), [(1, 1), (4, 1), (7, 2), (16, 4)])
def test_few_tokens_have_programs_of_few_outputs(num_tokens: int, block_out: int) -> None:
    assert SumTuning.of(num_tokens, 64).block_out == block_out
