"""The most likely id that each row may sample.

An entry b of B belongs to row rows_B[b]. Its logits lose what the row's state does not allow, what it suppresses and,
where wishes about ends are given, the ids that would end the row too early, unless these are all that is left. Of the
others the largest wins; of equal ones the smallest id, as with `torch.max`; NaN counts as larger than everything. Where
nothing is left, the winner is id 0 with −inf.

An id and its score make one integer, its rank, larger for the better: (score as an integer of the same order) · 2³² +
2³² − 1 − id. So the best of several is a plain maximum, and programs that share a row need not meet.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kestrel.kernels.row_tables import EndingTensors, GrammarTensors, RowState

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
