"""Packed masks on logits: bit by bit what plain Python says."""

from __future__ import annotations

import random

import pytest
import torch

from kestrel.runtime.rows import apply_masks


@pytest.mark.parametrize("vocab_size", [1, 7, 8, 9, 64, 333])
def test_a_mask_forbids_exactly_what_it_lacks(vocab_size: int) -> None:
    choose = random.Random(vocab_size)
    logits = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    permitted = {row: {i for i in range(vocab_size) if choose.random() < 0.4} for row in (9, 2)}
    masks = {row: sum(1 << i for i in ids).to_bytes(50, "little") for row, ids in permitted.items()}
    before = logits.clone()
    masked = apply_masks(logits, [5, 9, 0, 2], masks | {77: b""})
    assert torch.equal(logits, before), "the logits given were changed"
    for b, row in enumerate([5, 9, 0, 2]):
        for token_id in range(vocab_size):
            allowed = row not in permitted or token_id in permitted[row]
            assert masked[b, token_id] == (logits[b, token_id] if allowed else -torch.inf)


def test_ids_past_the_end_of_a_mask_are_forbidden() -> None:
    masked = apply_masks(torch.zeros(1, 20), [3], {3: b"\xff"})
    assert masked[0].isfinite().tolist() == [True] * 8 + [False] * 12


def test_without_masks_nothing_is_copied() -> None:
    logits = torch.zeros(2, 5)
    assert apply_masks(logits, [0, 1], {}) is logits
