"""An id for each row: the most likely one, or one that is drawn."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

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
from kestrel.kernels.sampling import LAST_ID, NAN_KEY, NEGATIVE_INF_KEY, SCORE_UNIT
from kestrel.kernels.triton.launch import NO_TABLE, TuningTable, dependent, wait_for_inputs

# ---------------------------------------------------------------------- the most likely id
# The most likely id of each row, vocabulary split between programs: each leaves the best rank of its block of ids.
#
# The first programs of a row read the vocabulary in order, the others the list of allowed ids; those that the row's
# state does not need leave −inf with id 0. Logits are read before it is known what the state forbids: so their way from
# memory and the one over row, state and lists run side by side.


NAN, UNIT, LAST = tl.constexpr(NAN_KEY), tl.constexpr(SCORE_UNIT), tl.constexpr(LAST_ID)


@dataclass(frozen=True, slots=True)
class BestTuning:
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
    """See `kestrel.kernels.sampling.rank`."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    key = tl.where(scores != scores, NAN, bits ^ ((bits >> 31) & NAN))
    return tl.max(key.to(tl.int64) * UNIT + (LAST - ids), axis=0)


@triton.jit(do_not_specialize=["num_entries"])
def _best_of_block(
    logits_ptr, rows_ptr, state_ptr, spent_ptr, allowed_ptr, suppressed_ptr, end_ids_ptr, is_limited_ptr,
    ends_from_ptr, stops_from_ptr, stop_ids_ptr, ranks_ptr, num_entries, vocab, row_stride, id_stride,
    ALLOWED: tl.constexpr, SUPPRESSED: tl.constexpr, ENDS: tl.constexpr, STOPS: tl.constexpr,
    VOCAB_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, HAS_ENDINGS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    block, entry = tl.program_id(0), tl.program_id(1)
    logits_ptr += entry.to(tl.int64) * row_stride
    ids = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    row = tl.load(rows_ptr + entry)
    state = tl.load(state_ptr + row)
    is_limited = tl.load(is_limited_ptr + state)
    wait_for_inputs(DEPENDENT)
    scores = tl.load(logits_ptr + ids * id_stride, mask=ids < vocab, other=float("-inf"))
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
    tuning: BestTuning | None = None,
    table: TuningTable = NO_TABLE,
) -> Tensor:
    """Ranks [sets, B, candidates], for `commit_ids`. Logits may lie anyhow."""
    num_entries, vocab = logits_BV.shape
    assert vocab == grammar.vocab_size
    assert rows_B.shape == (num_entries,)
    for tensor in (rows_B, rows.state, rows.spent, *grammar.tables):
        assert tensor.is_contiguous()
    chosen = tuning or table.find("best_ids", num_entries, (vocab,), logits_BV.dtype) or BestTuning()
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
        num_warps=chosen.num_warps, **dependent(),
    )  # fmt: skip
    return ranks


# ---------------------------------------------------------------------- wishes about scores
# A program reads what its row's kinds ask for and nothing else: rows without a wish are copied.


HAS_PENALTIES, HAS_BIAS = tl.constexpr(PENALTIES), tl.constexpr(BIAS)
HAS_MASK, HAS_ID_LIMITS = tl.constexpr(MASK), tl.constexpr(ID_LIMITS)


@dataclass(frozen=True, slots=True)
class WeighTuning:
    block_ids: int = 2048
    num_warps: int = 4


@triton.jit
def _permitted(scores, ids, words_ptr, inside):
    words = tl.load(words_ptr + ids // 32, mask=inside, other=0)
    return tl.where((words >> (ids % 32)) & 1 != 0, scores, float("-inf"))


@triton.jit
def _weigh_block(
    logits_ptr, rows_ptr, kinds_ptr, penalties_ptr, in_prompt_ptr, counts_ptr, bias_ptr, mask_ptr, limits_ptr, out_ptr,
    vocab, num_words, row_stride, id_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(1)
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    place = entry.to(tl.int64) * row_stride + ids.to(tl.int64) * id_stride
    scores = tl.load(logits_ptr + place, mask=inside, other=0.0).to(tl.float32)
    row = tl.load(rows_ptr + entry).to(tl.int64)
    kinds = tl.load(kinds_ptr + row)
    if kinds & HAS_PENALTIES:
        presence, frequency = tl.load(penalties_ptr + row * 3), tl.load(penalties_ptr + row * 3 + 1)
        repetition = tl.load(penalties_ptr + row * 3 + 2)
        count = tl.load(counts_ptr + row * vocab + ids, mask=inside, other=0.0)
        in_prompt = tl.load(in_prompt_ptr + row * vocab + ids, mask=inside, other=0) != 0
        repeated = tl.where(scores > 0, scores / repetition, scores * repetition)
        scores = tl.where(in_prompt | (count > 0), repeated, scores)
        scores = scores - frequency * count - tl.where(count > 0, presence, 0.0)
    if kinds & HAS_BIAS:
        scores += tl.load(bias_ptr + row * vocab + ids, mask=inside, other=0.0)
    if kinds & HAS_MASK:
        scores = _permitted(scores, ids, mask_ptr + row * num_words, inside)
    if kinds & HAS_ID_LIMITS:
        scores = _permitted(scores, ids, limits_ptr + row * num_words, inside)
    tl.store(out_ptr + entry.to(tl.int64) * vocab + ids, scores, mask=inside)


def weigh_ids(
    logits_BV: Tensor,
    rows_B: Tensor,
    wishes: ScoreWishes,
    tuning: WeighTuning | None = None,
    table: TuningTable = NO_TABLE,
) -> Tensor:
    """New scores in fp32, contiguous. Logits may lie anyhow."""
    num_entries, vocab = logits_BV.shape
    chosen = tuning or table.find("weigh_ids", num_entries, (vocab,), logits_BV.dtype) or WeighTuning()
    scores_BV = torch.empty(num_entries, vocab, dtype=torch.float32, device=logits_BV.device)
    numbers = wishes.penalties_R3, wishes.in_prompt_RV, wishes.counts_RV, wishes.bias_RV
    words = wishes.mask_RW, wishes.limits_RW
    for tensor in (wishes.kinds_R, rows_B, *numbers, *words):
        assert tensor is None or tensor.is_contiguous()
    # What is missing is not read, since no row of the step has that kind; only its type counts.
    given = [scores_BV if tensor is None else tensor for tensor in numbers]
    given += [wishes.kinds_R if tensor is None else tensor for tensor in words]
    _weigh_block[(triton.cdiv(vocab, chosen.block_ids), num_entries)](
        logits_BV, rows_B, wishes.kinds_R, *given, scores_BV,
        vocab, triton.cdiv(vocab, 32), logits_BV.stride(0), logits_BV.stride(1), BLOCK=chosen.block_ids,
        num_warps=chosen.num_warps,
    )  # fmt: skip
    return scores_BV


# ---------------------------------------------------------------------- drawn ids
# An id for each row, drawn without sorting: a race among all ids, and then the question whether its winner is kept.
#
# What truncation keeps is the beginning of an order: higher scores first, of equal ones smaller ids first. A winner
# that is kept has won among the kept ones too. One that is not rules out all ids behind it, and the race is run again
# among those before it. The likeliest id is always kept, so this ends, mostly at once: where a share p of all
# probability is kept, about 1 + ln(1/p) winners are looked at.
#
# The first race splits the vocabulary between programs: each leaves the best rank of its block of ids, the sum of their
# weights, who wins among them, and the exponential of every id. A second kernel, one program per entry, puts the blocks
# together and looks at winners; a look is a pass over the row's scores, which lie in the cache by then. It needs none
# where the row truncates nothing, where the likeliest id wins, and where that one alone exceeds top_p. With top_k and
# top_p both, the probability of the top_k is found first: a bisection, one pass a step.
#
# A weight is exp((score − best) / temperature), so probabilities are weights over their sum. Scores that differ count
# as different even where their quotients by the temperature are rounded to one number, which the plain version calls
# equal.


NOTHING = tl.constexpr(NEGATIVE_INF_KEY * SCORE_UNIT)
NEVER = tl.constexpr(0x7F800000 << 32)
"""An infinite time, with id 0."""
LOG2_E = tl.constexpr(1.4426950408889634)
LEAST_WEIGHT = tl.constexpr(1e-18)
"""The likeliest id waits for 16.7 at most, one of this weight for 2^-54 / 1e-18 = 55 at least: it never wins."""
GOLDEN_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class DrawTuning:
    block_ids: int = 1024
    num_warps: int = 4
    row_ids: int = 8192
    """Read at once by the program of an entry."""
    row_warps: int = 16


@triton.jit
def _mix(x):
    """See `kestrel.kernels.sampling`."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def uniform(seed, count, ids):
    """The numbers from 0 to 1 that `kestrel.kernels.sampling.exponentials` makes its own of, bit for bit."""
    stream = _mix(_mix(seed.to(tl.uint64, bitcast=True)) + count.to(tl.uint64, bitcast=True) * GOLDEN_GAMMA)
    bits = _mix(stream + (ids + 1).to(tl.uint64) * GOLDEN_GAMMA) >> 11
    return tl.minimum((bits.to(tl.float32) + 0.5) * 1.1102230246251565e-16, 0.999999940395355225)


@triton.jit
def exponential(u):
    """−log1p(−u)."""
    # 2 artanh(z), up to u = 1/4: what follows z^9 is 3e-10 of it. Beyond, 1 − u is exact enough for a logarithm.
    z = u / (2.0 - u)
    y = z * z
    series = 2.0 * z * (1.0 + y * (1.0 / 3 + y * (1.0 / 5 + y * (1.0 / 7 + y * (1.0 / 9)))))
    return tl.where(u < 0.25, series, -tl.log(1.0 - u))


@triton.jit
def _per_score(temperature):
    """Powers of two in the weight, per unit of the score."""
    return LOG2_E / tl.maximum(temperature, 1e-6)


@triton.jit
def _first(times, ids):
    """The earliest time and its id, the smallest among equals, as one integer."""
    return tl.min((times.to(tl.int32, bitcast=True).to(tl.int64) << 32) | ids.to(tl.int64), axis=0)


@triton.jit
def _time_of(racer):
    return (racer >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _score_of(rank):
    key = (rank >> 32).to(tl.int32)
    return (key ^ ((key >> 31) & NAN)).to(tl.float32, bitcast=True)


@triton.jit
def _race_in_block(
    scores_ptr, rows_ptr, temperature_ptr, seed_ptr, generated_ptr, noise_ptr, ranks_ptr, weights_ptr, racers_ptr,
    vocab, row_stride, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block, entry = tl.program_id(0), tl.program_id(1).to(tl.int64)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    scores = tl.load(scores_ptr + entry * row_stride + ids, mask=ids < vocab, other=float("-inf"))
    out = entry * BLOCKS + block
    tl.store(ranks_ptr + out, best_rank(scores, ids.to(tl.int64)))
    row = tl.load(rows_ptr + entry)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0.0:
        noise = exponential(uniform(tl.load(seed_ptr + row), tl.load(generated_ptr + row), ids))
        tl.store(noise_ptr + entry * vocab + ids, noise, mask=ids < vocab)
        best = tl.max(scores, axis=0)
        best = tl.where(tl.abs(best) < float("inf"), best, 0.0)
        weights = tl.exp2((scores - best) * _per_score(temperature))
        tl.store(weights_ptr + out, tl.sum(weights, axis=0))
        times = tl.where(ids < vocab, noise / tl.maximum(weights, LEAST_WEIGHT), float("inf"))
        tl.store(racers_ptr + out, _first(times, ids))


@triton.jit
def _ask(scores_ptr, noise_ptr, score, id, best, per_score, vocab, BLOCK: tl.constexpr):
    """(how many come before an id in the order, their weight, which of them wins) in one pass."""
    place = tl.arange(0, BLOCK)
    count, weight = tl.full((), 0, dtype=tl.int32), tl.full((), 0.0, dtype=tl.float32)
    first = tl.full((), NEVER, dtype=tl.int64)
    for start in range(0, vocab, BLOCK):
        ids = start + place
        scores = tl.load(scores_ptr + ids, mask=ids < vocab, other=float("-inf"))
        is_before = (scores > score) | ((scores == score) & (ids < id))
        found = tl.sum(is_before.to(tl.int32), axis=0)
        count += found
        if found > 0:
            noise = tl.load(noise_ptr + ids, mask=is_before, other=0.0)
            weights = tl.exp2((scores - best) * per_score)
            weight += tl.sum(tl.where(is_before, weights, 0.0), axis=0)
            times = tl.where(is_before, noise / tl.maximum(weights, LEAST_WEIGHT), float("inf"))
            first = tl.minimum(first, _first(times, ids))
    return count, weight, first & LAST


@triton.jit
def _split(scores_ptr, score, best, per_score, vocab, BLOCK: tl.constexpr):
    """(how many scores are above one, their weight, the least of them, the largest of the others) in one pass."""
    place = tl.arange(0, BLOCK)
    counts = tl.zeros((BLOCK,), dtype=tl.int32)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    least = tl.full((BLOCK,), float("inf"), dtype=tl.float32)
    largest = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    for start in range(0, vocab, BLOCK):
        ids = start + place
        scores = tl.load(scores_ptr + ids, mask=ids < vocab, other=float("-inf"))
        is_above = scores > score
        counts += is_above.to(tl.int32)
        sums += tl.where(is_above, tl.exp2((scores - best) * per_score), 0.0)
        least = tl.minimum(least, tl.where(is_above, scores, float("inf")))
        largest = tl.maximum(largest, tl.where(is_above, float("-inf"), scores))
    return tl.sum(counts, axis=0), tl.sum(sums, axis=0), tl.min(least, axis=0), tl.max(largest, axis=0)


@triton.jit
def _weight_of_top(scores_ptr, top_k, best, per_score, vocab, BLOCK: tl.constexpr):
    """Of the top_k highest scores together."""
    # Weights below 2^-126 are nothing; but a step down it must be, where scores have few digits left.
    low, high = best - tl.maximum(126.0 / per_score, tl.abs(best) * 1e-6), best
    count, weight, low, _ = _split(scores_ptr, low, best, per_score, vocab, BLOCK)
    above_high, weight_above_high = tl.full((), 0, dtype=tl.int32), tl.full((), 0.0, dtype=tl.float32)
    has_few = count <= top_k
    is_open = (has_few == 0) & (low < high)
    while is_open:
        # The score at place top_k is one from low to high, and both are scores of the row.
        middle = 0.5 * low + 0.5 * high
        middle = tl.where(middle < high, middle, low)
        count, weight, least, largest = _split(scores_ptr, middle, best, per_score, vocab, BLOCK)
        if count < top_k:
            high, above_high, weight_above_high = largest, count, weight
        else:
            low = least
        is_open = (count != top_k) & (low < high)
    tied = (top_k - above_high).to(tl.float32) * tl.exp2((high - best) * per_score)
    return tl.where(has_few | (count == top_k), weight, weight_above_high + tied)


@triton.jit
def _first_kept(
    scores_ptr, noise_ptr, winner, likeliest, best, total, per_score, top_k, top_p, min_p, vocab, BLOCK: tl.constexpr
):  # fmt: skip
    """The winner of the race among all ids, or whoever wins among those that are kept."""
    has_top_k = (top_k > 0) & (top_k < vocab)
    room = tl.where(has_top_k, top_k, vocab)
    share = tl.where(top_p < 1.0, top_p * total, float("inf"))
    # The likeliest id alone has weight 1.
    winner = tl.where((share < 1.0) | (room == 1), likeliest, winner)
    is_open = (winner != likeliest) & (has_top_k | (top_p < 1.0) | (min_p > 0.0))
    if is_open & has_top_k & (top_p < 1.0):
        share = top_p * _weight_of_top(scores_ptr, top_k, best, per_score, vocab, BLOCK)
    while is_open:
        score = tl.load(scores_ptr + winner)
        count, weight, following = _ask(scores_ptr, noise_ptr, score, winner, best, per_score, vocab, BLOCK)
        is_kept = (count < room) & (weight <= share) & (tl.exp2((score - best) * per_score) >= min_p)
        winner = tl.where(is_kept, winner, following)
        is_open = (is_kept == 0) & (winner != likeliest)
    return winner


@triton.jit
def _settle(
    scores_ptr, noise_ptr, ranks_ptr, weights_ptr, racers_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr,
    min_p_ptr, out_ptr, vocab, row_stride, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + entry)
    b = tl.arange(0, WIDTH)
    place = entry * BLOCKS + b
    ranks = tl.load(ranks_ptr + place, mask=b < BLOCKS, other=NOTHING)
    temperature = tl.load(temperature_ptr + row)
    best_rank_of_row = tl.max(ranks, axis=0)
    best, likeliest = _score_of(best_rank_of_row), LAST - (best_rank_of_row & LAST)
    chosen = likeliest
    if (temperature > 0.0) & (tl.abs(best) < float("inf")):
        per_score = _per_score(temperature)
        scale = tl.exp2((_score_of(ranks) - best) * per_score)
        total = tl.sum(tl.load(weights_ptr + place, mask=b < BLOCKS, other=0.0) * scale, axis=0)
        racers = tl.load(racers_ptr + place, mask=b < BLOCKS, other=NEVER)
        winner = _first(_time_of(racers) / tl.maximum(scale, LEAST_WEIGHT), racers & LAST) & LAST
        top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        chosen = _first_kept(
            scores_ptr + entry * row_stride, noise_ptr + entry * vocab, winner, likeliest, best, total, per_score,
            top_k, top_p, min_p, vocab, BLOCK,
        )  # fmt: skip
    tl.store(out_ptr + entry, best_rank_of_row + likeliest - chosen)


def draw_ids(
    scores_BV: Tensor,
    rows_B: Tensor,
    rows: DrawingRows,
    tuning: DrawTuning | None = None,
    table: TuningTable = NO_TABLE,
) -> Tensor:
    """Ranks [1, B, 1], for `commit_ids`; see `kestrel.kernels.sampling`. Rows of scores may lie apart."""
    num_entries, vocab = scores_BV.shape
    assert rows_B.shape == (num_entries,)
    assert scores_BV.dtype is torch.float32
    assert scores_BV.stride(1) == 1
    own = (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
    for tensor in (rows_B, rows.seed, rows.generated, *own):
        assert tensor.is_contiguous()
    chosen = tuning or table.find("draw_ids", num_entries, (vocab,), scores_BV.dtype) or DrawTuning()
    blocks = triton.cdiv(vocab, chosen.block_ids)

    def empty(width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_entries, width, dtype=dtype, device=scores_BV.device)

    noise_BV, weights_BC = empty(vocab, torch.float32), empty(blocks, torch.float32)
    ranks_BC, racers_BC, out_B1 = (empty(width, torch.int64) for width in (blocks, blocks, 1))
    _race_in_block[(blocks, num_entries)](
        scores_BV, rows_B, rows.temperature, rows.seed, rows.generated, noise_BV, ranks_BC, weights_BC, racers_BC,
        vocab, scores_BV.stride(0), BLOCKS=blocks, BLOCK=chosen.block_ids, num_warps=chosen.num_warps,
    )  # fmt: skip
    _settle[(num_entries,)](
        scores_BV, noise_BV, ranks_BC, weights_BC, racers_BC, rows_B, *own, out_B1, vocab, scores_BV.stride(0),
        BLOCKS=blocks, WIDTH=triton.next_power_of_2(blocks), BLOCK=chosen.row_ids, num_warps=chosen.row_warps,
    )  # fmt: skip
    return out_B1[None]
