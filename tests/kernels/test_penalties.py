"""Penalties against a loop over rows and ids."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel.kernels.sampling import Penalties, penalise

VOCAB = 7
SCORES = st.lists(st.floats(-30, 30, width=32), min_size=VOCAB, max_size=VOCAB)
IDS = st.lists(st.integers(0, VOCAB - 1), max_size=12)
ROWS = st.lists(
    st.tuples(SCORES, IDS, IDS, st.floats(-2, 2), st.floats(-2, 2), st.floats(0.1, 2)), min_size=1, max_size=4
)


def by_hand(
    scores: list[float], prompt: list[int], answer: list[int], presence: float, frequency: float, repetition: float
) -> list[float]:
    result = list(scores)
    for token_id in range(VOCAB):
        if token_id in prompt or token_id in answer:
            positive = result[token_id] > 0
            result[token_id] = result[token_id] / repetition if positive else result[token_id] * repetition
        for _ in range(answer.count(token_id)):
            result[token_id] -= frequency
        if token_id in answer:
            result[token_id] -= presence
    return result


@settings(deadline=None)
@given(ROWS)
def test_penalties_equal_a_plain_loop(rows: list[tuple]) -> None:
    scores, prompts, answers, presence, frequency, repetition = zip(*rows, strict=True)
    counts = torch.tensor([[float(answer.count(i)) for i in range(VOCAB)] for answer in answers])
    in_prompt = torch.tensor([[i in prompt for i in range(VOCAB)] for prompt in prompts])
    how = Penalties(torch.tensor(presence), torch.tensor(frequency), torch.tensor(repetition))
    ours = penalise(torch.tensor(scores), in_prompt, counts, how).tolist()
    for row, got in zip(rows, ours, strict=True):
        assert all(math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-4) for a, b in zip(got, by_hand(*row), strict=True))


def test_neutral_penalties_change_no_bit() -> None:
    scores = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    everything = torch.ones(3, VOCAB)
    neutral = Penalties(torch.zeros(3), torch.zeros(3), torch.ones(3))
    assert torch.equal(penalise(scores, everything.bool(), everything, neutral), scores)
