"""What each row emits, and what is noted of it, in one launch: a program of one warp per entry."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kestrel.kernels.row_tables import (
    CARRIES_COORD,
    CARRIES_SIZE,
    COORD,
    END_STATE,
    GOING_ON,
    NO_ID,
    NOT_FINITE,
    OUT_OF_BUDGET,
    SIZE,
    STOPPED,
    TEXT,
    EndingTensors,
    GrammarTensors,
    RegionHeads,
    RowState,
)
from kestrel.kernels.sampling import INF_KEY, LAST_ID, NEGATIVE_INF_KEY
from kestrel.kernels.triton.launch import dependent, wait_for_inputs

LOWEST = tl.constexpr(-(2**63))
LAST = tl.constexpr(LAST_ID)
INF, NEGATIVE_INF = tl.constexpr(INF_KEY), tl.constexpr(NEGATIVE_INF_KEY)
NOTHING, ENDED = tl.constexpr(NO_ID), tl.constexpr(END_STATE)
IS_TEXT, IS_COORD, IS_SIZE = tl.constexpr(TEXT), tl.constexpr(COORD), tl.constexpr(SIZE)
WITH_COORD, WITH_SIZE = tl.constexpr(CARRIES_COORD), tl.constexpr(CARRIES_SIZE)
ON, STOP, OUT = tl.constexpr(GOING_ON), tl.constexpr(STOPPED), tl.constexpr(OUT_OF_BUDGET)
UNSOUND = tl.constexpr(NOT_FINITE)


@triton.jit
def _chosen(ranks_ptr, set_stride, SETS: tl.constexpr, CANDIDATES: tl.constexpr, WIDTH: tl.constexpr):
    """(whether its score is finite, the id): of the first set with anything above −inf, or of the last."""
    c = tl.arange(0, WIDTH)
    best = tl.max(tl.load(ranks_ptr + c, mask=c < CANDIDATES, other=LOWEST), axis=0)
    if SETS == 2:
        last = tl.max(tl.load(ranks_ptr + set_stride + c, mask=c < CANDIDATES, other=LOWEST), axis=0)
        best = tl.where((best >> 32) > NEGATIVE_INF, best, last)
    key = best >> 32
    return (key > NEGATIVE_INF) & (key < INF), LAST - (best & LAST)


@triton.jit
def _kind_and_value(
    entry, emitted, carries, coords_ptr, sizes_ptr, coord_id, size_id,
    HAS_COORDS: tl.constexpr, HAS_SIZES: tl.constexpr,
):  # fmt: skip
    """(kind of token, coordinate or width, height, log-probability); 0 where there is none."""
    kind = tl.full((), IS_TEXT, dtype=tl.int64)
    first, second = tl.full((), 0.0, dtype=tl.float32), tl.full((), 0.0, dtype=tl.float32)
    logprob = tl.full((), 0.0, dtype=tl.float32)
    if HAS_COORDS:
        is_coord = (emitted == coord_id) & ((carries & WITH_COORD) > 0)
        kind = tl.where(is_coord, IS_COORD, kind)
        first = tl.where(is_coord, tl.load(coords_ptr + 2 * entry), first)
        logprob = tl.where(is_coord, tl.load(coords_ptr + 2 * entry + 1), logprob)
    if HAS_SIZES:
        is_size = (emitted == size_id) & ((carries & WITH_SIZE) > 0)
        kind = tl.where(is_size, IS_SIZE, kind)
        first = tl.where(is_size, tl.load(sizes_ptr + 3 * entry), first)
        second = tl.where(is_size, tl.load(sizes_ptr + 3 * entry + 1), second)
        logprob = tl.where(is_size, tl.load(sizes_ptr + 3 * entry + 2), logprob)
    return kind, first, second, logprob


@triton.jit(do_not_specialize=["set_stride"])
def _commit(
    ranks_ptr, rows_ptr, last_id_ptr, last_kind_ptr, last_value_ptr, state_ptr, spent_ptr, generated_ptr, budget_ptr,
    max_total_ptr, end_ids_ptr, phase_ptr, carries_ptr, when_spent_ptr, edge_id_ptr, edge_goto_ptr, edge_emit_ptr,
    stop_ids_ptr, coords_ptr, sizes_ptr, integers_ptr, values_ptr, vocab, coord_id, size_id, set_stride,
    SETS: tl.constexpr, CANDIDATES: tl.constexpr, RANKS: tl.constexpr, ENDS: tl.constexpr, EDGES: tl.constexpr,
    EDGE_WIDTH: tl.constexpr, STOPS: tl.constexpr, STOP_WIDTH: tl.constexpr,
    HAS_ENDINGS: tl.constexpr, HAS_COORDS: tl.constexpr, HAS_SIZES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0)
    row = tl.load(rows_ptr + entry)
    state, spent, generated = tl.load(state_ptr + row), tl.load(spent_ptr + row), tl.load(generated_ptr + row)
    budget, max_total = tl.load(budget_ptr + row), tl.load(max_total_ptr + row)
    when_spent, phase = tl.load(when_spent_ptr + state), tl.load(phase_ptr + state)
    carries = tl.load(carries_ptr + state)
    e = tl.arange(0, EDGE_WIDTH)
    edge_ids = tl.load(edge_id_ptr + state * EDGES + e, mask=e < EDGES, other=NOTHING)
    wait_for_inputs(DEPENDENT)
    is_finite, sampled = _chosen(ranks_ptr + entry * CANDIDATES, set_stride, SETS, CANDIDATES, RANKS)

    sampled = tl.where((spent >= budget) & (when_spent != NOTHING), when_spent, sampled)
    edge = state * (EDGES + 1) + tl.min(tl.where(edge_ids == sampled, e, EDGES), axis=0)
    goto, emit = tl.load(edge_goto_ptr + edge), tl.load(edge_emit_ptr + edge)
    emitted = tl.where(emit == NOTHING, sampled, emit)
    has_ended = goto == ENDED
    if HAS_ENDINGS:
        s = tl.arange(0, STOP_WIDTH)
        stop_ids = tl.load(stop_ids_ptr + row * STOPS + s, mask=s < STOPS, other=NOTHING)
        hits = tl.max((stop_ids == sampled).to(tl.int32), axis=0)
        has_ended = has_ended | ((hits > 0) & (tl.load(end_ids_ptr + state * ENDS) < vocab))
    following = tl.where(has_ended, state, goto)
    kind, first, second, logprob = _kind_and_value(
        entry, emitted, carries, coords_ptr, sizes_ptr, coord_id, size_id, HAS_COORDS, HAS_SIZES
    )

    spent = tl.where(tl.load(phase_ptr + following) != phase, 0, spent + 1)
    generated = tl.where(has_ended, generated, generated + 1)
    ends_when_spent = tl.load(when_spent_ptr + following) == NOTHING
    is_out = ((spent >= budget) & ends_when_spent) | (generated >= max_total)
    finish = tl.where(is_finite, tl.where(has_ended, STOP, tl.where(is_out, OUT, ON)), UNSOUND)

    tl.store(last_id_ptr + row, emitted)
    tl.store(last_kind_ptr + row, kind)
    tl.store(last_value_ptr + 2 * row, first)
    tl.store(last_value_ptr + 2 * row + 1, second)
    tl.store(state_ptr + row, following)
    tl.store(spent_ptr + row, spent)
    tl.store(generated_ptr + row, generated)
    out = integers_ptr + 5 * entry
    tl.store(out, emitted)
    tl.store(out + 1, kind)
    tl.store(out + 2, finish)
    tl.store(out + 3, following)
    tl.store(out + 4, spent)
    tl.store(values_ptr + 3 * entry, first)
    tl.store(values_ptr + 3 * entry + 1, second)
    tl.store(values_ptr + 3 * entry + 2, logprob)


def commit_ids(
    ranks_SBC: Tensor,
    rows_B: Tensor,
    rows: RowState,
    grammar: GrammarTensors,
    endings: EndingTensors | None,
    region: RegionHeads,
) -> tuple[Tensor, Tensor]:
    """(integers [B, 5]: emitted id, kind, finish, state, spent; values [B, 3] in fp32: one
    or two numbers, and their log-probability), and the rows updated."""
    num_sets, num_entries, candidates = ranks_SBC.shape
    assert num_sets in (1, 2)
    own = (
        rows.last_id, rows.last_kind, rows.last_value, rows.state, rows.spent, rows.generated, rows.budget,
        rows.max_total,
    )  # fmt: skip
    coords_B2 = rows.last_value if region.coords_B2 is None else region.coords_B2
    sizes_B3 = rows.last_value if region.sizes_B3 is None else region.sizes_B3
    stop_ids_RS = grammar.end_ids_NF if endings is None else endings.stop_ids_RS
    for tensor in (ranks_SBC, rows_B, *own, *grammar.tables, stop_ids_RS, coords_B2, sizes_B3):
        assert tensor.is_contiguous()
    assert coords_B2.dtype is sizes_B3.dtype is torch.float32
    integers_B5 = torch.empty(num_entries, 5, dtype=torch.int64, device=rows_B.device)
    values_B3 = torch.empty(num_entries, 3, dtype=torch.float32, device=rows_B.device)
    edges, stops = grammar.edge_id_NE.shape[1], stop_ids_RS.shape[1]
    _commit[(num_entries,)](
        ranks_SBC, rows_B, *own, grammar.end_ids_NF, grammar.phase_N, grammar.carries_N, grammar.when_spent_N,
        grammar.edge_id_NE, grammar.edge_goto, grammar.edge_emit, stop_ids_RS, coords_B2, sizes_B3,
        integers_B5, values_B3, grammar.vocab_size, region.coord_id, region.size_id, num_entries * candidates,
        SETS=num_sets, CANDIDATES=candidates, RANKS=triton.next_power_of_2(candidates),
        ENDS=grammar.end_ids_NF.shape[1], EDGES=edges, EDGE_WIDTH=triton.next_power_of_2(edges),
        STOPS=stops, STOP_WIDTH=triton.next_power_of_2(stops), HAS_ENDINGS=endings is not None,
        HAS_COORDS=region.coords_B2 is not None, HAS_SIZES=region.sizes_B3 is not None, num_warps=1,
        **dependent(),
    )  # fmt: skip
    return integers_B5, values_B3
