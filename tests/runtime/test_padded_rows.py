"""Which rows are read together, and that a crowd about one picture is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kestrel.runtime.attention import (
    LEAST_SHARED,
    AttentionGroup,
    JoinedRows,
    LayerInputs,
    OneChunk,
    PaddedRows,
    RowQueries,
    SharedRows,
    padded_groups,
    slots_of,
)
from kestrel.runtime.rows import GrammarTables, RowTable
from tests.moondream.goldens import golden
from tests.runtime.paged import paged
from tests.runtime.test_paged_equality import all_skills, dense

CPU = torch.device("cpu")
PAGE_SIZE, NUM_PAGES = 16, 40
SHARED_PAGES = LEAST_SHARED // PAGE_SIZE + 2


def table_of(*beginnings: int) -> RowTable:
    """Rows whose first pages are one of several sets, and whose other pages are their own."""
    table = RowTable(len(beginnings), NUM_PAGES, 0, 10, GrammarTables(10, CPU), CPU)
    for row, beginning in enumerate(beginnings):
        table.pages[row] = torch.arange(NUM_PAGES) + (10 + row) * NUM_PAGES
        table.pages[row, :SHARED_PAGES] = torch.arange(SHARED_PAGES) + beginning * NUM_PAGES
    return table


def groups_of(table: RowTable, starts: list[int], count: int = 1) -> list[AttentionGroup]:
    rows = [RowQueries(at * count, count, start, at) for at, start in enumerate(starts)]
    found = padded_groups(rows, table, PAGE_SIZE, lambda r, p: slots_of(table, PAGE_SIZE, r, p))
    return list(found)


def members(group: object) -> list[int]:
    match group:
        case PaddedRows(keys):
            at_NQ = keys.at_NQ
        case SharedRows(_, own):
            at_NQ = own.at_NQ
        case JoinedRows(SharedRows(_, own)):
            at_NQ = own.at_NQ
        case _:
            raise AssertionError(group)
    return sorted(at_NQ[:, 0].tolist())


def shared_slots(group: object) -> list[int]:
    """Of a joined list these are the first ones, and those that every query sees."""
    if isinstance(group, SharedRows):
        return group.shared_slots_S.tolist()
    assert isinstance(group, JoinedRows)
    seen_by_all_L = (group.bias_ML == 0).all(dim=0)
    return group.slots_L[seen_by_all_L].tolist()


def test_rows_are_grouped_by_the_pages_they_begin_with() -> None:
    table = table_of(1, 2, 1, 2, 1, 2, 1, 2, 3, 3)
    groups = groups_of(table, [SHARED_PAGES * PAGE_SIZE + row for row in range(10)])
    assert [(type(group), members(group)) for group in groups] == [
        (JoinedRows, [0, 2, 4, 6]),
        (JoinedRows, [1, 3, 5, 7]),
        (JoinedRows, [8, 9]),
    ]
    assert shared_slots(groups[0]) == [NUM_PAGES * PAGE_SIZE + slot for slot in range(SHARED_PAGES * PAGE_SIZE)]


def test_many_queries_or_long_rows_are_not_joined() -> None:
    behind = SHARED_PAGES * PAGE_SIZE
    four, three = table_of(1, 1, 1, 1), table_of(1, 1, 1)
    assert [type(group) for group in groups_of(four, [behind] * 4, count=8)] == [JoinedRows]
    assert [type(group) for group in groups_of(four, [behind] * 4, count=9)] == [SharedRows]
    assert [type(group) for group in groups_of(four, [behind + 100] * 4)] == [SharedRows]
    assert [type(group) for group in groups_of(three, [behind] * 3, count=10)] == [JoinedRows]
    assert [type(group) for group in groups_of(three, [behind] * 3, count=11)] == [PaddedRows]
    assert [type(group) for group in groups_of(three, [behind, 7, 7])] == [PaddedRows]


def test_a_page_that_a_row_has_yet_to_fill_is_not_shared() -> None:
    table = table_of(1, 1, 1, 1)
    behind = SHARED_PAGES * PAGE_SIZE - 1
    (group,) = groups_of(table, [behind, 400, 400, 400])
    assert len(shared_slots(group)) == (SHARED_PAGES - 1) * PAGE_SIZE
    assert isinstance(groups_of(table, [LEAST_SHARED - 1] * 4)[0], PaddedRows)


def test_a_page_larger_than_what_is_asked_for_and_a_page_that_all_begin_with() -> None:
    table = table_of(1, 1, 1, 1, 2, 2, 2, 2)
    table.pages[:, 0] = 5
    for page_size, start in ((1024, 735), (1024, 1100), (1, 300), (16, 400)):
        rows = [RowQueries(at, 1, start, at) for at in range(8)]
        found = [
            members(group) if isinstance(group, PaddedRows) else (len(shared_slots(group)), members(group))
            for group in padded_groups(rows, table, page_size, lambda r, p: slots_of(table, PAGE_SIZE, r, p % 100))
        ]
        if (page_size, start) == (1024, 1100):
            assert found == [(1024, [*range(8)])]
        elif page_size == 16:
            assert found == [(SHARED_PAGES * 16, [0, 1, 2, 3]), (SHARED_PAGES * 16, [4, 5, 6, 7])]
        else:
            assert found == [[*range(8)]]


def test_many_queries_are_left_to_the_usual_way() -> None:
    table = table_of(1, 1, 1, 1)
    rows = [RowQueries(65 * at, 65, 400, at) for at in range(4)]
    (group,) = padded_groups(rows, table, PAGE_SIZE, lambda r, p: slots_of(table, PAGE_SIZE, r, p))
    assert isinstance(group, PaddedRows)


@pytest.mark.parametrize(
    ("counts", "kind"), [((1, 1, 1, 1, 1), JoinedRows), ((3, 1, 2, 1, 4), JoinedRows), ((9, 1, 2, 9, 4), SharedRows)]
)
def test_a_mixed_batch_gives_what_its_rows_give_for_themselves(counts: tuple[int, ...], kind: type) -> None:
    table = table_of(1, 1, 1, 1, 2)
    firsts = [sum(counts[:row]) for row in range(5)]
    starts = [SHARED_PAGES * PAGE_SIZE + 7 * row for row in range(5)]
    rows = [RowQueries(*numbers) for numbers in zip(firsts, counts, starts, range(5), strict=True)]
    dice = torch.Generator().manual_seed(0)
    cache = torch.randn(2, 15 * NUM_PAGES, PAGE_SIZE, 2, 8, generator=dice)
    q_THD = torch.randn(sum(counts), 4, 8, generator=dice)
    layer = LayerInputs(q_THD, q_THD, q_THD, cache[0], cache[1], 1.0, 1.0)

    def attended(queries: list[RowQueries], out_THD: Tensor) -> list[type]:
        groups = list(padded_groups(queries, table, PAGE_SIZE, lambda r, p: slots_of(table, PAGE_SIZE, r, p)))
        for group in groups:
            group.attend(layer, out_THD)
        return [type(group) for group in groups]

    alone = [OneChunk if one.count == 1 else PaddedRows for one in rows]
    together, apart = torch.full_like(q_THD, torch.nan), torch.full_like(q_THD, torch.nan)
    assert attended(rows, together) == [kind, alone[-1]]
    assert [attended([one], apart) for one in rows] == [[kind] for kind in alone]
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=2e-6)


def test_questions_about_a_picture_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: set[tuple[int, int, int]] = set()

    def note(kind: type, attend: Callable[..., None]) -> None:
        def noted(group: Any, *more: Any) -> None:
            own = group.own if isinstance(group, SharedRows) else group.apart.own
            sizes.add((*own.at_NQ.shape, len(shared_slots(group))))
            attend(group, *more)

        monkeypatch.setattr(kind, "attend", noted)

    for kind in (SharedRows, JoinedRows):
        note(kind, kind.attend)
    g = golden("md2")
    cases = all_skills(g, "a", "small")
    assert paged(g.model).run(*cases) == dense(g, cases)
    assert (6, 1, 720) in sizes, "a token for each of six"
    assert any(queries > 1 for _, queries, _ in sizes), "their questions"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("which", ["keys", "values"])
def test_a_row_of_numbers_that_are_not_finite_spoils_no_other(which: str, bad: float) -> None:
    table = table_of(1, 1, 1, 1)
    rows = [RowQueries(row, 1, SHARED_PAGES * PAGE_SIZE + 5, row) for row in range(4)]
    dice = torch.Generator().manual_seed(0)
    cache = torch.randn(2, 15 * NUM_PAGES, PAGE_SIZE, 2, 8, generator=dice)
    q_THD = torch.randn(4, 4, 8, generator=dice)

    def attended() -> Tensor:
        out_THD = torch.full_like(q_THD, torch.nan)
        (group,) = padded_groups(rows, table, PAGE_SIZE, lambda r, p: slots_of(table, PAGE_SIZE, r, p))
        assert isinstance(group, JoinedRows)
        group.attend(LayerInputs(q_THD, q_THD, q_THD, cache[0], cache[1], 1.0, 1.0), out_THD)
        return out_THD

    healthy = attended()
    own = slots_of(table, PAGE_SIZE, torch.tensor([2]), torch.tensor([SHARED_PAGES * PAGE_SIZE + 1]))
    cache.flatten(1, 2)[0 if which == "keys" else 1, own] = bad
    spoilt = attended()
    torch.testing.assert_close(spoilt[[0, 1, 3]], healthy[[0, 1, 3]], rtol=1e-5, atol=2e-6)
    assert not torch.equal(spoilt[2], healthy[2])
