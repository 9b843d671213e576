"""What surrounds a decode step: reading the rows, the choice of ids, and what is noted of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kestrel.bench.kernels.case import HALF_BYTES, PAGE_SIZE, Case, Maker, Sizes, op_case
from kestrel.bench.kernels.tunings import best_ids_tunings, draw_ids_tunings, row_inputs_tunings, weigh_ids_tunings
from kestrel.kernels.ops import PLAIN, Ops
from kestrel.kernels.row_tables import (
    BIAS,
    END_STATE,
    NO_ID,
    PENALTIES,
    DrawingRows,
    EndingTensors,
    GrammarTensors,
    RegionHeads,
    RowState,
    ScoreWishes,
)
from kestrel.kernels.sampling import chosen
from kestrel.kernels.triton.ops import TRITON

NUM_STATES, LIST_WIDTH = 64, 8
COORD_ID, SIZE_ID = 5, 6
NEVER_SPENT = 1 << 30
DRAWS = ((0.5, 0, 0.3), (1.0, 0, 1.0), (1.0, 50, 1.0))
"""Temperature, top_k and top_p: of the skills, of nothing cut off, and with a fixed number."""
Tables: TypeAlias = tuple[RowState, GrammarTensors, EndingTensors | None]


def sampling_cases(sizes: Sizes) -> Iterator[Case]:
    for rows in sizes.decode_rows:
        yield _inputs_case(sizes, rows)
        yield _greedy_case(sizes.text.vocab_size, rows, has_endings=False)
        yield _greedy_case(sizes.text.vocab_size, rows, has_endings=True)
        for num_wishing in dict.fromkeys((1, rows)):
            yield _weigh_case(sizes.text.vocab_size, rows, num_wishing)
        for how in DRAWS:
            yield _draw_case(sizes.text.vocab_size, rows, *how)


def _inputs_case(sizes: Sizes, rows: int) -> Case:
    num_pages = -(-sizes.max_keys // PAGE_SIZE)

    def make(maker: Maker) -> tuple[Any, ...]:
        rows_B, positions_B = maker.order(rows), maker.integers(sizes.num_keys, rows)
        return rows_B, positions_B, maker.integers(1000, rows, num_pages), _rows(maker, rows), PAGE_SIZE

    return op_case(
        "row_inputs",
        f"{rows} rows of {num_pages} pages",
        make,
        bytes_moved=2 * 8 * rows * num_pages,
        flop=0,
        tunings=row_inputs_tunings(),
    )


def _weigh_case(vocab: int, rows: int, num_wishing: int) -> Case:
    """Penalties and biases of some rows."""

    def make(maker: Maker) -> tuple[Any, ...]:
        kinds_R = ((maker.order(rows) < num_wishing) * (PENALTIES | BIAS)).to(torch.int32)
        numbers = partial(maker.numbers, dtype=torch.float32)
        wishes = ScoreWishes(
            kinds_R, numbers(rows, 3).abs() + 0.5, numbers(rows, vocab) > 1, numbers(rows, vocab).clamp(min=0).round(),
            numbers(rows, vocab),
        )  # fmt: skip
        return maker.numbers(rows, vocab), maker.order(rows), wishes

    moved = rows * vocab * (HALF_BYTES + 4) + num_wishing * vocab * 9
    size = f"{rows}x{vocab}, {num_wishing} with wishes"
    return op_case("weigh_ids", size, make, bytes_moved=moved, flop=0, tunings=weigh_ids_tunings())


def _greedy_case(vocab: int, rows: int, has_endings: bool) -> Case:
    def make(maker: Maker) -> tuple[Any, ...]:
        logits, rows_B = maker.numbers(rows, vocab), maker.order(rows)
        endings = _endings(maker, rows, vocab) if has_endings else None
        coords, sizes = (maker.numbers(rows, *more, dtype=torch.float32) for more in ((2,), (3,)))
        region = RegionHeads(COORD_ID, SIZE_ID, coords, sizes) if has_endings else RegionHeads(COORD_ID, SIZE_ID)
        return logits, rows_B, (_rows(maker, rows), _free_text(maker, vocab), endings), region

    return Case(
        op="greedy_ids",
        size=f"{rows}x{vocab}{', with wishes and values' if has_endings else ''}",
        plain=partial(_greedy, PLAIN),
        triton=partial(_greedy, TRITON),
        make=make,
        bytes_moved=rows * vocab * HALF_BYTES,
        flop=0,
        tunings=best_ids_tunings(),
    )


def _greedy(
    ops: Ops, logits: Tensor, rows_B: Tensor, tables: Tables, region: RegionHeads, **tuning: Any
) -> tuple[Tensor, Tensor]:
    return ops.commit_ids(ops.best_ids(logits, rows_B, *tables, **tuning), rows_B, *tables, region)


def _drawn(ops: Ops, *arguments: Any, **tuning: Any) -> Tensor:
    return chosen(ops.draw_ids(*arguments, **tuning))[1]


def _draw_case(vocab: int, rows: int, temperature: float, top_k: int, top_p: float) -> Case:
    def make(maker: Maker) -> tuple[Any, ...]:
        # Steep as a model's scores are: the likeliest id has some percent of all probability, not a thousandth.
        scores = maker.numbers(rows, vocab, scale=2.5, dtype=torch.float32)
        return scores, maker.order(rows), _drawing_rows(maker, rows, temperature, top_k, top_p)

    return Case(
        op="draw_ids",
        size=f"{rows}x{vocab}, temperature {temperature}, top_k {top_k}, top_p {top_p}",
        plain=partial(_drawn, PLAIN),
        triton=partial(_drawn, TRITON),
        make=make,
        bytes_moved=rows * vocab * 4,
        flop=0,
        tunings=draw_ids_tunings(),
    )


def _rows(maker: Maker, rows: int) -> RowState:
    def full(value: int) -> Tensor:
        return torch.full((rows,), value, device=maker.device)

    last_value = torch.zeros(rows, 2, device=maker.device)
    return RowState(full(1), full(0), last_value, full(0), full(0), full(0), full(NEVER_SPENT), full(NEVER_SPENT))


def _drawing_rows(maker: Maker, rows: int, temperature: float, top_k: int, top_p: float) -> DrawingRows:
    def full(value: float) -> Tensor:
        return torch.full((rows,), value, device=maker.device)

    state = _rows(maker, rows)
    own = {field.name: getattr(state, field.name) for field in fields(state)}
    own["generated"] = maker.integers(100, rows)
    return DrawingRows(
        **own,
        seed=maker.integers(1 << 40, rows),
        temperature=full(temperature),
        top_k=full(top_k),
        top_p=full(top_p),
        min_p=full(0.0),
    )


def _free_text(maker: Maker, vocab: int) -> GrammarTensors:
    """A state in which id 0 ends, id 1 may not be sampled, and everything else goes on."""

    def lists(width: int, fill: int, first: int | None = None) -> Tensor:
        table = torch.full((NUM_STATES, width), fill, device=maker.device)
        if first is not None:
            table[:, 0] = first
        return table

    return GrammarTensors(
        vocab_size=vocab,
        allowed_NA=lists(LIST_WIDTH, vocab),
        suppressed_NS=lists(LIST_WIDTH, vocab, first=1),
        end_ids_NF=lists(LIST_WIDTH, vocab, first=0),
        is_limited_N=lists(1, 0)[:, 0],
        phase_N=lists(1, 0)[:, 0],
        carries_N=lists(1, 3)[:, 0],
        when_spent_N=lists(1, NO_ID)[:, 0],
        edge_id_NE=lists(LIST_WIDTH, NO_ID, first=0),
        edge_goto=lists(LIST_WIDTH + 1, 0, first=END_STATE),
        edge_emit=lists(LIST_WIDTH + 1, NO_ID),
    )


def _endings(maker: Maker, rows: int, vocab: int) -> EndingTensors:
    from_the_tenth = torch.full((rows,), 10, device=maker.device)
    return EndingTensors(from_the_tenth, from_the_tenth.clone(), maker.integers(vocab, rows, 2 * LIST_WIDTH))
