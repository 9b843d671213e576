"""The sampling step as Triton kernels against the plain version: equal in every integer."""

from __future__ import annotations

from tests.kernels.triton_mode import devices  # isort: skip - before any kernel

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kestrel.grammar import END, Carries
from kestrel.kernels.commit_ids import commit_ids as plain_commit_ids
from kestrel.kernels.row_tables import (
    CARRIES_COORD,
    CARRIES_SIZE,
    END_STATE,
    GOING_ON,
    NOT_FINITE,
    OUT_OF_BUDGET,
    STOPPED,
    RegionHeads,
)
from kestrel.kernels.row_tables import row_inputs as plain_row_inputs
from kestrel.kernels.sampling import best_ids as plain_best_ids
from kestrel.kernels.sampling import chosen, rank
from kestrel.kernels.triton.commit_ids import commit_ids
from kestrel.kernels.triton.row_tables import row_inputs
from kestrel.kernels.triton.sampling import BestTuning, best_ids
from tests.exhaustive import sweep
from tests.kernels.random_rules import RandomRules, Rules, columns

NUM_ROWS = 12
SMALL = BestTuning(block_ids=32, num_warps=1)
INF = float("inf")


def best(
    rules: Rules, logits_BV: Tensor, rows_B: Tensor, has_endings: bool, tuning: BestTuning = SMALL
) -> list[Tensor]:
    """Of both versions: which scores are finite, and the ids."""
    tables = (rules.rows, rules.grammar, rules.endings if has_endings else None)
    got = chosen(best_ids(logits_BV, rows_B, *tables, tuning=tuning))
    expected = chosen(plain_best_ids(logits_BV, rows_B, *tables))
    assert [x.tolist() for x in got] == [x.tolist() for x in expected]
    return list(got)


@devices
@pytest.mark.parametrize("has_endings", [False, True])
@sweep("vocab", [13, 64, 101], always=[64, 101])
def test_the_best_id_is_that_of_the_plain_version(vocab: int, has_endings: bool, device: str) -> None:
    for seed in range(2):
        make = RandomRules(vocab, device, seed)
        rules = make.make(NUM_ROWS, NUM_ROWS, width=8 if seed % 2 else 5)
        rows_B = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(seed)).to(device)
        _, ids_B = best(rules, make.logits(NUM_ROWS), rows_B, has_endings)
        assert len(set(ids_B.tolist())) > 4


@devices
def test_blocks_of_any_size_and_logits_lying_anyhow_give_the_same(device: str) -> None:
    make = RandomRules(101, device)
    rules, rows_B, logits_BV = make.make(NUM_ROWS, 9), make.below(NUM_ROWS, 9), make.logits(9)
    expected = best(rules, logits_BV, rows_B, has_endings=True)[1].tolist()
    wide = torch.full((9, 300), 99.0, device=device)
    wide[:, :202:2] = logits_BV
    turned = logits_BV.t().contiguous().t()
    apart, bf16, half = wide[:, :202:2], logits_BV.bfloat16(), logits_BV.half()
    ways = ((apart, SMALL), (apart, BestTuning()), (turned, BestTuning()), (bf16, SMALL), (half, BestTuning()))
    for lying, tuning in ways:
        assert best(rules, lying, rows_B, has_endings=True, tuning=tuning)[1].tolist() == expected


@devices
@pytest.mark.parametrize("special", [float("nan"), INF, -INF, 0.0])
def test_numbers_that_are_none_and_both_zeros_rank_as_in_torch(special: float, device: str) -> None:
    make = RandomRules(37, device, 6)
    rules = make.make(NUM_ROWS, NUM_ROWS)
    logits_BV = make.logits(NUM_ROWS)
    logits_BV = torch.where(make.below(3, *logits_BV.shape) == 0, special, logits_BV)
    logits_BV = torch.where((logits_BV == 0) & (make.below(2, *logits_BV.shape) == 0), -0.0, logits_BV)
    for has_endings in (False, True):
        is_finite_B, _ = best(rules, logits_BV, torch.arange(NUM_ROWS, device=device), has_endings)
        assert is_finite_B.any()
        assert special <= 0.0 or not is_finite_B.all()


@devices
def test_where_everything_is_forbidden_the_score_is_not_finite_and_the_id_is_0(device: str) -> None:
    make = RandomRules(20, device)
    rules = make.make(4, 4)
    grammar = rules.grammar
    grammar.allowed_NA[:] = grammar.vocab_size
    grammar.allowed_NA[:, :3] = torch.tensor([7, 3, 5])
    grammar.suppressed_NS[:] = grammar.vocab_size
    grammar.suppressed_NS[:, :3] = torch.tensor([3, 5, 7])
    grammar.is_limited_N[:] = 1
    for has_endings in (False, True):
        is_finite_B, ids_B = best(rules, make.logits(4), torch.arange(4, device=device), has_endings)
        assert not is_finite_B.any()
        assert ids_B.tolist() == [0] * 4


@devices
def test_a_row_that_can_only_end_may_do_so_early(device: str) -> None:
    make = RandomRules(20, device)
    rules = make.make(4, 4)
    grammar = rules.grammar
    for ids_NX in (grammar.allowed_NA, grammar.end_ids_NF, grammar.suppressed_NS):
        ids_NX[:] = grammar.vocab_size
    grammar.is_limited_N[:] = 1
    grammar.allowed_NA[:, 0] = grammar.end_ids_NF[:, 0] = 9
    rules.endings.ends_from_R[:] = 99
    assert best(rules, make.logits(4), torch.arange(4, device=device), has_endings=True)[1].tolist() == [9] * 4
    grammar.allowed_NA[:, 1] = 12
    assert best(rules, make.logits(4), torch.arange(4, device=device), has_endings=True)[1].tolist() == [12] * 4


def commit_both(rules: Rules, ranks_SBC: Tensor, rows_B: Tensor, has_endings: bool, region: RegionHeads) -> Tensor:
    """Both versions leave the same; gives the integers."""
    mine, plain = rules.copy(), rules.copy()
    got, expected = (
        commit(ranks_SBC, rows_B, own.rows, own.grammar, own.endings if has_endings else None, region)
        for commit, own in ((commit_ids, mine), (plain_commit_ids, plain))
    )
    for one, other in zip((*got, *columns(mine.rows)), (*expected, *columns(plain.rows)), strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)
    return got[0]


@devices
@pytest.mark.parametrize("has_endings", [False, True])
def test_rows_advance_as_in_the_plain_version(has_endings: bool, device: str) -> None:
    finishes: set[int] = set()
    kinds: set[int] = set()
    for seed in range(6):
        make = RandomRules(17, device, seed)
        rules = make.make(NUM_ROWS, NUM_ROWS)
        rows_B = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(seed)).to(device)
        scores_B = make.below(9, NUM_ROWS).float()
        scores_B[:3] = torch.tensor([float("nan"), INF, -INF])
        ranks_SBC = rank(scores_B, make.below(17, NUM_ROWS))[None, :, None]
        integers_B5 = commit_both(rules, ranks_SBC, rows_B, has_endings, rules.region)
        assert integers_B5[:3, 2].tolist() == [NOT_FINITE] * 3
        finishes |= set(integers_B5[:, 2].tolist())
        kinds |= set(integers_B5[:, 1].tolist())
    assert finishes == {GOING_ON, STOPPED, OUT_OF_BUDGET, NOT_FINITE}
    assert kinds == {0, 1, 2}


@devices
def test_only_the_region_heads_that_ran_give_values(device: str) -> None:
    make, num_rows = RandomRules(6, device), 24
    rules = make.make(num_rows, num_rows)
    ranks_SBC = rank(torch.zeros(num_rows, device=device), make.below(6, num_rows))[None, :, None]
    rows_B = torch.arange(num_rows, device=device)
    given = {
        (0,): RegionHeads(3, 2),
        (0, 1): replace(rules.region, sizes_B3=None),
        (0, 2): replace(rules.region, coords_B2=None),
    }
    for kinds, region in given.items():
        integers_B5 = commit_both(rules, ranks_SBC, rows_B, False, region)
        assert set(integers_B5[:, 1].tolist()) == set(kinds)


@devices
@pytest.mark.parametrize("has_endings", [False, True])
def test_steps_one_after_another_stay_equal(has_endings: bool, device: str) -> None:
    make = RandomRules(101, device)
    mine = make.make(NUM_ROWS, NUM_ROWS)
    plain = mine.copy()
    rows_B = torch.arange(NUM_ROWS, device=device)
    for _ in range(4):
        logits_BV = make.logits(NUM_ROWS)
        left = []
        for own, best_of, commit in ((mine, best_ids, commit_ids), (plain, plain_best_ids, plain_commit_ids)):
            tables = (own.rows, own.grammar, own.endings if has_endings else None)
            left.append(commit(best_of(logits_BV, rows_B, *tables), rows_B, *tables, own.region))
        for one, other in zip((*left[0], *columns(mine.rows)), (*left[1], *columns(plain.rows)), strict=True):
            assert torch.equal(one, other)


@devices
def test_entries_that_fill_up_a_batch_change_nothing_for_the_others(device: str) -> None:
    make = RandomRules(31, device)
    alone = make.make(NUM_ROWS, 8)
    filled, logits_BV = alone.copy(), make.logits(8)
    rows_B = torch.tensor([5, 2, 9, *[NUM_ROWS - 1] * 5], device=device)
    left = []
    for rules, count in ((alone, 3), (filled, 8)):
        tables = (rules.rows, rules.grammar, rules.endings)
        ranks = best_ids(logits_BV[:count], rows_B[:count], *tables, tuning=SMALL)
        left.append(commit_ids(ranks, rows_B[:count], *tables, rules.region))
    assert torch.equal(left[0][0], left[1][0][:3])
    assert torch.equal(left[0][1], left[1][1][:3])
    for one, other in zip(columns(alone.rows), columns(filled.rows), strict=True):
        assert torch.equal(one[:-1], other[:-1])
    assert 0 <= int(filled.rows.state[-1]) < len(filled.grammar.phase_N)


@devices
@pytest.mark.parametrize("num_pages", [1, 7, 300])
def test_inputs_are_those_of_the_plain_version(num_pages: int, device: str) -> None:
    make = RandomRules(31, device)
    rules, pages_RP = make.make(NUM_ROWS, 1), make.below(500, NUM_ROWS, num_pages)
    rows_B, positions_B = make.below(NUM_ROWS, 11), make.below(7 * num_pages, 11)
    got, expected = (gather(rows_B, positions_B, pages_RP, rules.rows, 7) for gather in (row_inputs, plain_row_inputs))
    for one, other in zip(got, expected, strict=True):
        assert one.dtype is other.dtype
        assert one.is_contiguous()
        assert torch.equal(one, other)


@devices
def test_the_next_positions_may_be_left_in_place_of_the_given_ones(device: str) -> None:
    make = RandomRules(31, device)
    rules, pages_RP = make.make(NUM_ROWS, 1), make.below(500, NUM_ROWS, 300)
    rows_B, positions_B = make.below(NUM_ROWS, 11), make.below(7 * 300 - 2, 11)
    for gather in (row_inputs, plain_row_inputs):
        kept, moved_B = positions_B.clone(), positions_B.clone()
        for step in range(2):
            got = gather(rows_B, moved_B, pages_RP, rules.rows, 7, moved_B)
            expected = plain_row_inputs(rows_B, kept + step, pages_RP, rules.rows, 7)
            assert all(map(torch.equal, got, expected))
            assert torch.equal(moved_B, kept + step + 1)


def test_inputs_of_an_entry_lie_where_its_pages_say() -> None:
    rows = RandomRules(31, "cpu").make(3, 1).rows
    pages_RP = torch.tensor([[10, 11], [20, 21], [30, 31]])
    inputs = plain_row_inputs(torch.tensor([2, 0]), torch.tensor([5, 3]), pages_RP, rows, 4)
    assert inputs.slots_B.tolist() == [31 * 4 + 1, 10 * 4 + 3]
    assert inputs.num_keys_B.tolist() == [6, 4]
    assert inputs.pages_BP.tolist() == [[30, 31], [10, 11]]
    assert inputs.last_id_B.tolist() == [int(rows.last_id[2]), int(rows.last_id[0])]


def test_ranks_sort_by_score_and_then_by_the_smaller_id() -> None:
    scores = torch.tensor([float("nan"), INF, 3.5, 1e-40, 0.0, -0.0, -1e-40, -2.0, -3e38, -INF])
    ranks = rank(scores, torch.tensor([9, 8, 7, 6, 4, 5, 3, 2, 1, 0]))
    assert ranks.tolist() == sorted(ranks.tolist(), reverse=True)
    assert len(set(ranks.tolist())) == len(ranks)
    is_finite, ids = chosen(ranks[None, :, None])
    assert is_finite.tolist() == [False, False, *[True] * 7, False]
    assert ids.tolist() == [9, 8, 7, 6, 4, 5, 3, 2, 1, 0]


def test_kernels_and_grammars_mean_the_same_by_their_numbers() -> None:
    assert (END, int(Carries.COORD), int(Carries.SIZE)) == (END_STATE, CARRIES_COORD, CARRIES_SIZE)
