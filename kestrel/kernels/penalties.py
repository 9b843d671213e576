"""Scores of ids that were said before, made smaller (or larger).

repetition r, for ids seen in prompt or answer: s / r where s > 0, else s · r.
then, with c times in the answer:               s − frequency · c − presence · [c > 0].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Penalties:
    presence_B: Tensor
    frequency_B: Tensor
    repetition_B: Tensor


def penalise(logits_BV: Tensor, in_prompt_BV: Tensor, counts_BV: Tensor, how: Penalties) -> Tensor:
    """New scores. `counts_BV`: how often the answer so far holds each id; `in_prompt_BV`: whether the prompt does."""
    assert logits_BV.shape == in_prompt_BV.shape == counts_BV.shape
    in_answer_BV = counts_BV > 0
    repetition_B1 = how.repetition_B[:, None]
    repeated_BV = torch.where(logits_BV > 0, logits_BV / repetition_B1, logits_BV * repetition_B1)
    scores_BV = torch.where(in_prompt_BV | in_answer_BV, repeated_BV, logits_BV)
    return scores_BV - how.frequency_B[:, None] * counts_BV - how.presence_B[:, None] * in_answer_BV
