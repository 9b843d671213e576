"""The most likely id of each row, vocabulary split between programs: each leaves the best rank of its block of ids.

The first programs of a row read the vocabulary in order, the others the list of allowed ids; those that the row's state
does not need leave −inf with id 0. Logits are read before it is known what the state forbids: so their way from memory
and the one over row, state and lists run side by side.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel.kernels.best_ids import LAST_ID, NAN_KEY, SCORE_UNIT
from kestrel.kernels.row_tables import EndingTensors, GrammarTensors, RowState
from kestrel.kernels.triton.tuning_table import NO_TABLE, TuningTable

NAN, UNIT, LAST = tl.constexpr(NAN_KEY), tl.constexpr(SCORE_UNIT), tl.constexpr(LAST_ID)


@dataclass(frozen=True, slots=True)
class Tuning:
    block_ids: int = 1024
    num_warps: int = 4


@triton.jit
def _without(scores, ids, list_ptr, vocab, WIDTH: tl.constexpr):
    """Scores with the ids of a list at −inf; mostly it is empty or short."""
    place = 0
    forbidden = tl.load(list_ptr)
    while forbidden < vocab:
        scores = tl.where(ids == forbidden, float("-inf"), scores)
        place += 1
        forbidden = tl.load(list_ptr + place, mask=place < WIDTH, other=vocab)
    return scores


@triton.jit
def best_rank(scores, ids):
    """See `kestrel.kernels.best_ids.rank`."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    key = tl.where(scores != scores, NAN, bits ^ ((bits >> 31) & NAN))
    return tl.max(key.to(tl.int64) * UNIT + (LAST - ids), axis=0)


@triton.jit(do_not_specialize=["num_entries"])
def _best_of_block(
    logits_ptr, rows_ptr, state_ptr, spent_ptr, allowed_ptr, suppressed_ptr, end_ids_ptr, is_limited_ptr,
    ends_from_ptr, stops_from_ptr, stop_ids_ptr, ranks_ptr, num_entries, vocab, row_stride, id_stride,
    ALLOWED: tl.constexpr, SUPPRESSED: tl.constexpr, ENDS: tl.constexpr, STOPS: tl.constexpr,
    VOCAB_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, HAS_ENDINGS: tl.constexpr,
):  # fmt: skip
    block, entry = tl.program_id(0), tl.program_id(1)
    logits_ptr += entry.to(tl.int64) * row_stride
    ids = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    scores = tl.load(logits_ptr + ids * id_stride, mask=ids < vocab, other=float("-inf"))
    row = tl.load(rows_ptr + entry)
    state = tl.load(state_ptr + row)
    is_limited = tl.load(is_limited_ptr + state)
    reads_list = block >= VOCAB_BLOCKS
    if reads_list:
        place = ids - VOCAB_BLOCKS * BLOCK
        ids = tl.load(allowed_ptr + state * ALLOWED + place, mask=place < ALLOWED, other=vocab)
        scores = tl.load(logits_ptr + ids * id_stride, mask=ids < vocab, other=float("-inf"))
    is_idle = reads_list != (is_limited != 0)
    # Padding loses to every id; what is idle, and all that is forbidden, stands for id 0.
    ids = tl.where(is_idle, 0, tl.where(ids < vocab, ids, LAST))
    scores = tl.where(is_idle, float("-inf"), scores.to(tl.float32))
    if not is_idle:
        scores = _without(scores, ids, suppressed_ptr + state * SUPPRESSED, vocab, SUPPRESSED)
    out = ranks_ptr + entry * BLOCKS + block
    if HAS_ENDINGS:
        # The second set is for rows that have nothing but ends left.
        tl.store(out + num_entries * BLOCKS, best_rank(scores, ids))
        spent = tl.load(spent_ptr + row)
        ends = end_ids_ptr + state * ENDS
        if spent < tl.load(ends_from_ptr + row):
            scores = _without(scores, ids, ends, vocab, ENDS)
        if (spent < tl.load(stops_from_ptr + row)) & (tl.load(ends) < vocab):
            scores = _without(scores, ids, stop_ids_ptr + row * STOPS, vocab, STOPS)
    tl.store(out, best_rank(scores, ids))


def best_ids(
    logits_BV: Tensor,
    rows_B: Tensor,
    rows: RowState,
    grammar: GrammarTensors,
    endings: EndingTensors | None,
    tuning: Tuning | None = None,
    table: TuningTable = NO_TABLE,
) -> Tensor:
    """Ranks [sets, B, candidates], for `commit_ids`. Logits may lie anyhow."""
    num_entries, vocab = logits_BV.shape
    assert vocab == grammar.vocab_size
    assert rows_B.shape == (num_entries,)
    for tensor in (rows_B, rows.state, rows.spent, *grammar.tables):
        assert tensor.is_contiguous()
    chosen = tuning or table.find("best_ids", num_entries, (vocab,), logits_BV.dtype) or Tuning()
    vocab_blocks = triton.cdiv(vocab, chosen.block_ids)
    blocks = vocab_blocks + triton.cdiv(grammar.allowed_NA.shape[1], chosen.block_ids)
    ranks = torch.empty(2 if endings else 1, num_entries, blocks, dtype=torch.int64, device=rows_B.device)
    own = endings or EndingTensors(rows.spent, rows.spent, grammar.end_ids_NF)
    for tensor in (own.ends_from_R, own.stops_from_R, own.stop_ids_RS):
        assert tensor.is_contiguous()
    _best_of_block[(blocks, num_entries)](
        logits_BV, rows_B, rows.state, rows.spent, grammar.allowed_NA, grammar.suppressed_NS, grammar.end_ids_NF,
        grammar.is_limited_N, own.ends_from_R, own.stops_from_R, own.stop_ids_RS, ranks, num_entries, vocab,
        logits_BV.stride(0), logits_BV.stride(1),
        ALLOWED=grammar.allowed_NA.shape[1], SUPPRESSED=grammar.suppressed_NS.shape[1],
        ENDS=grammar.end_ids_NF.shape[1], STOPS=own.stop_ids_RS.shape[1],
        VOCAB_BLOCKS=vocab_blocks, BLOCKS=blocks, BLOCK=chosen.block_ids, HAS_ENDINGS=endings is not None,
        num_warps=chosen.num_warps,
    )  # fmt: skip
    return ranks
