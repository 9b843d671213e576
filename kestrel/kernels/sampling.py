"""The most likely id that each row may sample.

An entry b of B belongs to row rows_B[b]. Its logits lose what the row's state does not allow, what it suppresses and,
where wishes about ends are given, the ids that would end the row too early, unless these are all that is left. Of the
others the largest wins; of equal ones the smallest id, as with `torch.max`; NaN counts as larger than everything. Where
nothing is left, the winner is id 0 with −inf.

An id and its score make one integer, its rank, larger for the better: (score as an integer of the same order) · 2³² +
2³² − 1 − id. So the best of several is a plain maximum, and programs that share a row need not meet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kestrel.kernels.row_tables import (
    BIAS,
    ID_LIMITS,
    MASK,
    PENALTIES,
    DrawingRows,
    EndingTensors,
    GrammarTensors,
    RowState,
    ScoreWishes,
)

SCORE_UNIT = 2**32
LAST_ID = SCORE_UNIT - 1
NAN_KEY = 0x7FFFFFFF
INF_KEY = 0x7F800000
NEGATIVE_INF_KEY = -INF_KEY - 1


def best_ids(
    logits_BV: Tensor, rows_B: Tensor, rows: RowState, grammar: GrammarTensors, endings: EndingTensors | None
) -> Tensor:
    """Ranks [sets, B, candidates], for `chosen`. Logits of any floating dtype are compared as fp32."""
    masked_BV = allowed_scores(logits_BV, rows_B, rows, grammar, endings)
    best_B, id_B = masked_BV.max(-1)
    return rank(best_B, id_B)[None, :, None]


def allowed_scores(
    logits_BV: Tensor, rows_B: Tensor, rows: RowState, grammar: GrammarTensors, endings: EndingTensors | None
) -> Tensor:
    """Scores in fp32 with everything at −inf that a row must not sample."""
    assert logits_BV.shape == (len(rows_B), grammar.vocab_size)
    state_B = rows.state[rows_B]
    masked_BV = mask(logits_BV.float(), state_B, grammar)
    if endings is not None:
        masked_BV = forbid_ends(masked_BV, rows_B, state_B, rows.spent[rows_B], grammar, endings)
    return masked_BV


def mask(scores_BV: Tensor, state_B: Tensor, grammar: GrammarTensors) -> Tensor:
    """Scores with everything a row's state forbids at −inf."""
    padded = functional.pad(scores_BV, (0, 1))  # a column past the vocabulary for padding, cut off again
    limited = torch.full_like(padded, -torch.inf)
    allowed_BA = grammar.allowed_NA[state_B]
    limited.scatter_(1, allowed_BA, padded.gather(1, allowed_BA))
    masked = torch.where(grammar.is_limited_N[state_B][:, None].bool(), limited, padded)
    masked.scatter_(1, grammar.suppressed_NS[state_B], -torch.inf)
    return masked[:, :-1]


def forbid_ends(
    scores_BV: Tensor, rows_B: Tensor, state_B: Tensor, spent_B: Tensor, grammar: GrammarTensors, endings: EndingTensors
) -> Tensor:
    """Scores with the ids that would end a row too early at −inf, unless nothing else is left to sample."""
    nothing, spent_B1 = grammar.vocab_size, spent_B[:, None]
    is_early_B1 = spent_B1 < endings.ends_from_R[rows_B][:, None]
    ends_BF = torch.where(is_early_B1, grammar.end_ids_NF[state_B], nothing)
    stops_early_B1 = (spent_B1 < endings.stops_from_R[rows_B][:, None]) & can_end(state_B, grammar)[:, None]
    stops_BS = torch.where(stops_early_B1, endings.stop_ids_RS[rows_B], nothing)
    padded = functional.pad(scores_BV, (0, 1))
    limited_BV = padded.scatter(1, torch.cat((ends_BF, stops_BS), dim=1), -torch.inf)[:, :-1]
    must_end_B1 = limited_BV.amax(-1, keepdim=True).isneginf()
    return torch.where(must_end_B1, scores_BV, limited_BV)


def can_end(state_B: Tensor, grammar: GrammarTensors) -> Tensor:
    """Rows that some id of the grammar would finish."""
    return grammar.end_ids_NF[state_B, 0] < grammar.vocab_size


def rank(score_B: Tensor, id_B: Tensor) -> Tensor:
    # Both zeros are equal numbers.
    bits = torch.where(score_B == 0, 0.0, score_B.float()).view(torch.int32)
    key = torch.where(score_B.isnan(), NAN_KEY, bits ^ ((bits >> 31) & NAN_KEY))
    return key.long() * SCORE_UNIT + (LAST_ID - id_B)


def chosen(ranks_SBC: Tensor) -> tuple[Tensor, Tensor]:
    """(whether its score is finite [B], the best id [B]) of the first set with anything above −inf, or of the last."""
    best_SB = ranks_SBC.amax(2)
    best_B = best_SB[-1]
    for earlier_B in best_SB[:-1].flip(0):
        best_B = torch.where(earlier_B // SCORE_UNIT > NEGATIVE_INF_KEY, earlier_B, best_B)
    key_B = best_B // SCORE_UNIT
    return (key_B > NEGATIVE_INF_KEY) & (key_B < INF_KEY), LAST_ID - best_B % SCORE_UNIT


# ---------------------------------------------------------------------- penalties
# Scores of ids that were said before, made smaller (or larger).
#
# repetition r, for ids seen in prompt or answer: s / r where s > 0, else s · r.
# then, with c times in the answer:               s − frequency · c − presence · [c > 0].


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


# ---------------------------------------------------------------------- wishes about scores
# Scores of a step's entries after penalties, then biases, then what masks and id limits forbid at −inf. Scores of rows
# without a wish are their logits.


WORD = 32


def weigh_ids(logits_BV: Tensor, rows_B: Tensor, wishes: ScoreWishes) -> Tensor:
    """New scores in fp32."""
    scores_BV, kinds_B1 = logits_BV.float(), wishes.kinds_R[rows_B][:, None]
    if wishes.penalties_R3 is not None:
        assert wishes.in_prompt_RV is not None
        assert wishes.counts_RV is not None
        how = Penalties(*wishes.penalties_R3[rows_B].unbind(1))
        penalised_BV = penalise(scores_BV, wishes.in_prompt_RV[rows_B], wishes.counts_RV[rows_B], how)
        scores_BV = torch.where((kinds_B1 & PENALTIES) != 0, penalised_BV, scores_BV)
    if wishes.bias_RV is not None:
        scores_BV = torch.where((kinds_B1 & BIAS) != 0, scores_BV + wishes.bias_RV[rows_B], scores_BV)
    for kind, bits_RW in ((MASK, wishes.mask_RW), (ID_LIMITS, wishes.limits_RW)):
        if bits_RW is not None:
            forbidden_BV = ~_bits(bits_RW[rows_B], scores_BV.shape[1]) & ((kinds_B1 & kind) != 0)
            scores_BV = scores_BV.masked_fill(forbidden_BV, -torch.inf)
    return scores_BV


def _bits(words_BW: Tensor, count: int) -> Tensor:
    bits_W = torch.arange(WORD, dtype=words_BW.dtype, device=words_BW.device)
    return (words_BW[:, :, None] >> bits_W & 1).flatten(1)[:, :count].bool()


# ---------------------------------------------------------------------- truncating and drawing
# Choosing one token per row, from logits to id, without leaving the device.
#
# truncate: p = softmax(logits / T); keep the top_k most likely; renormalise; drop token i when the probability of all
# likelier tokens together exceeds top_p (so the token that crosses top_p stays); drop p < min_p · max p; renormalise.
# draw: a race. Every id waits for e_i / p_i, e_i exponential, and the first one is drawn; it is i with probability p_i.
# e_i depends on the row's seed, its token count and the id alone, so a draw is the same in every batch. Last bits of
# the logits, which other batches do change, matter where two ids arrive together or an id is just kept or not, but not
# at the end of each of many shares of [0, 1).


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


# ---------------------------------------------------------------------- ids for all rows
# An id for each row that draws, and the most likely one for the others.
#
# An entry b of B belongs to row rows_B[b], whose numbers say how it chooses: with temperature 0 as `best_ids` does,
# otherwise by truncation and race from the row's seed and its count of generated tokens.
# A row whose best score is not finite has nothing to draw from: its id is one of the vocabulary, and any will do.


def draw_ids(scores_BV: Tensor, rows_B: Tensor, rows: DrawingRows) -> Tensor:
    """Ranks [1, B, 1], for `commit_ids`: the row's best score with the chosen id.

    Scores are fp32, what a row must not sample at −inf, as of `allowed_scores`.
    """
    best_B, likeliest_B = scores_BV.max(-1)
    how = Truncation(rows.temperature[rows_B], rows.top_k[rows_B], rows.top_p[rows_B], rows.min_p[rows_B])
    drawn_B = draw(*truncate(scores_BV, how), rows.seed[rows_B], rows.generated[rows_B])
    return rank(best_B, torch.where(how.temperature_B > 0, drawn_B, likeliest_B))[None, :, None]
