"""Choosing one token per row, from logits to id, without leaving the device.

truncate: p = softmax(logits / T); keep the top_k most likely; renormalise; drop token i when the probability of all
likelier tokens together exceeds top_p (so the token that crosses top_p stays); drop p < min_p · max p; renormalise.
draw: a race. Every id waits for e_i / p_i, e_i exponential, and the first one is drawn; it is i with probability p_i.
e_i depends on the row's seed, its token count and the id alone, so a draw is the same in every batch. Last bits of the
logits, which other batches do change, matter where two ids arrive together or an id is just kept or not, but not at the
end of each of many shares of [0, 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Truncation:
    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor


def truncate(logits_BV: Tensor, how: Truncation) -> tuple[Tensor, Tensor]:
    """(probabilities in likelihood order [B, V], ids in that order [B, V]). Rows with temperature 0 are not meant."""
    assert logits_BV.ndim == 2
    temperature_B1 = how.temperature_B.clamp(min=1e-6)[:, None]
    sorted_BV, order_BV = torch.sort(logits_BV.float() / temperature_B1, dim=-1, descending=True, stable=True)
    probs_BV = torch.softmax(sorted_BV, dim=-1)
    rank_V = torch.arange(probs_BV.shape[-1], device=probs_BV.device)
    keeps_all_B1 = (how.top_k_B <= 0)[:, None]
    probs_BV = probs_BV.masked_fill(~(keeps_all_B1 | (rank_V < how.top_k_B[:, None])), 0.0)
    probs_BV = probs_BV / probs_BV.sum(-1, keepdim=True)
    likelier_BV = probs_BV.cumsum(-1) - probs_BV
    probs_BV = probs_BV.masked_fill(likelier_BV > how.top_p_B[:, None], 0.0)
    probs_BV = probs_BV.masked_fill(probs_BV < how.min_p_B[:, None] * probs_BV[:, :1], 0.0)
    return probs_BV / probs_BV.sum(-1, keepdim=True), order_BV


def draw(probs_BV: Tensor, order_BV: Tensor, seed_B: Tensor, count_B: Tensor) -> Tensor:
    """One id per row, from what `truncate` gave."""
    by_id_BV = torch.zeros_like(probs_BV).scatter_(1, order_BV, probs_BV)
    return (exponentials(seed_B, count_B, probs_BV.shape[1]) / by_id_BV).argmin(-1)


def exponentials(seed_B: Tensor, count_B: Tensor, num_ids: int) -> Tensor:
    """[B, num_ids] of mean 1, above 0 and finite, each from (seed, count, id) alone."""
    id_V = torch.arange(1, num_ids + 1, device=seed_B.device)
    stream_B = _mix(_mix(seed_B) + count_B * _GOLDEN_GAMMA)
    bits_BV = _shift_right(_mix(stream_B[:, None] + id_V * _GOLDEN_GAMMA), 11)
    # Small numbers keep all their digits; the largest is what float32 has below 1.
    uniform_BV = ((bits_BV.float() + 0.5) * 2.0**-53).clamp(max=1.0 - 2.0**-24)
    return -torch.log1p(-uniform_BV)


_GOLDEN_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64, the step of SplitMix64


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser, in wrapping int64 arithmetic."""
    x = (x ^ _shift_right(x, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ _shift_right(x, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
