"""Scores after penalties, biases, masks and limits against the plain version, in every mixture of them."""

from __future__ import annotations

from tests.kernels.triton_mode import Draw, devices  # isort: skip - before any kernel

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from kestrel.kernels.row_tables import BIAS, ID_LIMITS, MASK, PENALTIES, ScoreWishes
from kestrel.kernels.sampling import weigh_ids as plain
from kestrel.kernels.triton.sampling import WeighTuning, weigh_ids

BLOCK = WeighTuning().block_ids
KINDS = (0, PENALTIES, BIAS, MASK, ID_LIMITS, PENALTIES | BIAS, MASK | ID_LIMITS, PENALTIES | BIAS | MASK | ID_LIMITS)


def wishes(vocab_size: int, device: str) -> ScoreWishes:
    """A row of each mixture; numbers of kinds that a row does not have are there all the same."""
    draw, num_rows = Draw(device), len(KINDS)
    words = torch.randint(-(2**31), 2**31, (2, num_rows, -(-vocab_size // 32)), dtype=torch.int64)
    mask_RW, limits_RW = words.to(torch.int32).to(device)
    return ScoreWishes(
        torch.tensor(KINDS, dtype=torch.int32, device=device),
        penalties_R3=draw(num_rows, 3).abs() + 0.5,
        in_prompt_RV=draw(num_rows, vocab_size) > 0.5,
        counts_RV=(draw(num_rows, vocab_size) * 2).clamp(min=0).round(),
        bias_RV=draw(num_rows, vocab_size),
        mask_RW=mask_RW,
        limits_RW=limits_RW,
    )


def close(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == torch.float32
    assert torch.equal(got.isneginf(), expected.isneginf())
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


@devices
@pytest.mark.parametrize(("vocab_size", "dtype"), [*product((5, 97, BLOCK + 33), (torch.float32, torch.bfloat16))])
def test_every_mixture_of_wishes_gives_the_scores_of_the_plain_version(
    vocab_size: int, dtype: torch.dtype, device: str
) -> None:
    given, rows_B = wishes(vocab_size, device), torch.tensor([7, 0, 3, 3, 5, 1, 2, 4, 6], device=device)
    logits_BV = Draw(device)(len(rows_B), vocab_size).to(dtype)
    before = logits_BV.clone()
    close(weigh_ids(logits_BV, rows_B, given), plain(logits_BV, rows_B, given))
    assert torch.equal(logits_BV, before)


@devices
def test_what_no_row_of_the_step_has_may_be_missing(device: str) -> None:
    given, logits_BV = wishes(40, device), Draw(device)(2, 40)
    few = replace(given, penalties_R3=None, in_prompt_RV=None, counts_RV=None, bias_RV=None, mask_RW=None)
    rows_B = torch.tensor([0, 4], device=device)
    close(weigh_ids(logits_BV, rows_B, few), plain(logits_BV, rows_B, given))


@devices
def test_logits_may_be_columns_of_a_wider_tensor(device: str) -> None:
    given, wide = wishes(40, device), Draw(device)(3, 90)
    rows_B = torch.tensor([7, 1, 0], device=device)
    for logits_BV in (wide[:, 7:47], wide[:, ::2][:, :40]):
        close(weigh_ids(logits_BV, rows_B, given), plain(logits_BV, rows_B, given))
