"""Masks of structured answers and limits of ids on scores: bit by bit what plain Python says."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from kestrel.grammar import free_text
from kestrel.kernels.row_tables import BIAS, PENALTIES
from kestrel.kernels.sampling import weigh_ids
from kestrel.runtime.contract import RowStart
from kestrel.runtime.rows import WishTable
from kestrel.settings import SamplingParams

CPU = torch.device("cpu")


def scores(table: WishTable, logits_BV: Tensor, rows: list[int]) -> Tensor:
    return weigh_ids(logits_BV, torch.tensor(rows), table.tensors(table.among(rows)))


@pytest.mark.parametrize("vocab_size", [1, 7, 8, 9, 64, 333])
def test_a_mask_forbids_exactly_what_it_lacks(vocab_size: int) -> None:
    choose = random.Random(vocab_size)
    logits = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    permitted = {row: {i for i in range(vocab_size) if choose.random() < 0.4} for row in (9, 2)}
    masks = {row: sum(1 << i for i in ids).to_bytes(50, "little") for row, ids in permitted.items()}
    before, table = logits.clone(), WishTable(80, vocab_size, CPU)
    table.set_masks(masks | {77: b""})
    masked = scores(table, logits, [5, 9, 0, 2])
    assert torch.equal(logits, before), "the logits given were changed"
    for b, row in enumerate([5, 9, 0, 2]):
        for token_id in range(vocab_size):
            allowed = row not in permitted or token_id in permitted[row]
            assert masked[b, token_id] == (logits[b, token_id] if allowed else -torch.inf)


def test_ids_past_the_end_of_a_mask_are_forbidden() -> None:
    table = WishTable(4, 20, CPU)
    table.set_masks({3: b"\xff"})
    assert scores(table, torch.zeros(1, 20), [3])[0].isfinite().tolist() == [True] * 8 + [False] * 12


def test_a_mask_is_that_of_one_step() -> None:
    table, logits = WishTable(4, 20, CPU), torch.zeros(2, 20)
    table.set_masks({3: b"\1\0\0"})
    table.set_masks({1: b"\2\0\0"})
    assert table.among([3]) == 0
    assert scores(table, logits, [3, 1]).isfinite().sum(1).tolist() == [20, 1]
    table.set_masks({})
    assert table.among([1, 3]) == 0


def test_a_row_that_starts_anew_keeps_nothing_of_the_one_before() -> None:
    table, grammar = WishTable(4, 40, CPU), free_text(0)
    table.start([RowStart(2, grammar, SamplingParams(allowed_ids=(35, 7), suppressed_ids=(7,)), 10)])
    table.set_masks({2: b"\xff" * 5})
    assert scores(table, torch.zeros(1, 40), [2])[0].isfinite().nonzero().flatten().tolist() == [35]
    table.start([RowStart(2, grammar, SamplingParams(), 10)])
    assert table.among([2]) == 0
    table.set_masks({2: b"\7" + b"\0" * 4})
    assert scores(table, torch.zeros(1, 40), [2])[0].isfinite().nonzero().flatten().tolist() == [0, 1, 2]


def test_a_step_with_a_wish_is_one_with_every_kind_there_was() -> None:
    """So a mixture of wishes needs no capture of its own."""
    table, grammar = WishTable(4, 40, CPU), free_text(0)
    table.start([RowStart(1, grammar, SamplingParams(logit_bias=((3, 1.0),)), 10)])
    table.start([RowStart(2, grammar, SamplingParams(frequency_penalty=1.0), 10)])
    assert table.among([1]) == table.among([2]) == table.among([0, 1, 2]) == BIAS | PENALTIES
    assert table.among([0, 3]) == 0
    assert scores(table, torch.zeros(3, 40), [1, 2, 0]).sum(1).tolist() == [1.0, 0.0, 0.0]
