"""Deltas of adapters at both ends of a block: several small ones mixed, and a single large one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kestrel.bench.kernels.case import Case, Maker
from kestrel.bench.kernels.sizes import Sizes
from kestrel.bench.kernels.tunings import low_rank_tunings
from kestrel.bench.kernels.vision_cases import HALF_BYTES
from kestrel.kernels import low_rank
from kestrel.kernels.low_rank import SlotFactors, SlotTiles, stored_rank, tile_slots
from kestrel.kernels.triton import low_rank as triton_low_rank
from kestrel.kernels.triton.low_rank import usual_rows_per_tile


def low_rank_cases(sizes: Sizes) -> Iterator[Case]:
    for rows in sizes.adapted_rows:
        for adapters in sizes.adapters:
            slots = _Slots(*adapters)
            yield _input_case(sizes, rows, slots)
            yield _output_case(sizes, rows, slots)


@dataclass(frozen=True, slots=True)
class _Slots:
    count: int
    rank: int
    max_rank: int

    def factors(self, maker: Maker, num_out: int, num_in: int) -> SlotFactors:
        width = stored_rank(self.max_rank)
        a, b = (maker.numbers(self.count, *size, scale=size[1] ** -0.5) for size in ((width, num_in), (num_out, width)))
        ranks = [*[stored_rank(self.rank)] * self.count, 0]
        return SlotFactors(a, b, torch.tensor(ranks, dtype=torch.int32, device=maker.device))

    def tiles(self, maker: Maker, rows: int) -> SlotTiles:
        """Each adapter has as many rows, side by side."""
        slot_T = torch.arange(rows, device=maker.device) * self.count // rows
        return tile_slots(slot_T, self.count, usual_rows_per_tile(rows))

    def size(self, rows: int) -> str:
        room = "" if self.rank == self.max_rank else f" in slots of {self.max_rank}"
        return f"{rows} rows, {self.count} of rank {self.rank}{room}"


def _input_case(sizes: Sizes, rows: int, slots: _Slots) -> Case:
    text = sizes.text

    def make(maker: Maker) -> tuple[Any, ...]:
        wide = maker.numbers(rows, text.qkv_dim + text.ff_dim)
        qkv, hidden = wide[:, : text.qkv_dim], wide[:, text.qkv_dim :]
        factors = [slots.factors(maker, num_out, text.dim) for num_out in (text.qkv_dim, text.ff_dim)]
        return slots.tiles(maker, rows), maker.numbers(rows, text.dim), qkv, factors[0], hidden, factors[1]

    def run(add: Callable[..., None], *inputs: Any, **tuning: Any) -> tuple[Tensor, ...]:
        add(*inputs, activates_base=True, **tuning)
        return inputs[2], inputs[4]

    factor_numbers = slots.count * slots.rank * (2 * text.dim + text.qkv_dim + text.ff_dim)
    moved = factor_numbers + rows * (text.dim + 2 * (text.qkv_dim + text.ff_dim))
    return Case(
        op="add_input_deltas",
        size=slots.size(rows),
        plain=partial(run, low_rank.add_input_deltas),
        triton=partial(run, triton_low_rank.add_input_deltas),
        make=make,
        bytes_moved=moved * HALF_BYTES,
        flop=2 * rows * factor_numbers // slots.count,
        tunings=low_rank_tunings(usual_rows_per_tile(rows), slots.max_rank),
        is_plain_capturable=False,
    )


def _output_case(sizes: Sizes, rows: int, slots: _Slots) -> Case:
    text = sizes.text

    def make(maker: Maker) -> tuple[Any, ...]:
        joined = maker.numbers(rows, text.dim + text.ff_dim)
        total, y = maker.numbers(rows, text.dim), maker.numbers(rows, text.dim)
        reads_norm = torch.zeros(slots.count + 1, dtype=torch.int32, device=maker.device)
        proj, fc2 = (slots.factors(maker, text.dim, num_in) for num_in in (text.dim, text.ff_dim))
        tiles = slots.tiles(maker, rows)
        return tiles, total, joined[:, : text.dim], y, reads_norm, proj, joined[:, text.dim :], fc2

    def run(add: Callable[..., None], *inputs: Any, **tuning: Any) -> Tensor:
        add(*inputs, **tuning)
        return inputs[1]

    factor_numbers = slots.count * slots.rank * (3 * text.dim + text.ff_dim)
    return Case(
        op="add_output_deltas",
        size=slots.size(rows),
        plain=partial(run, low_rank.add_output_deltas),
        triton=partial(run, triton_low_rank.add_output_deltas),
        make=make,
        bytes_moved=(factor_numbers + rows * (3 * text.dim + text.ff_dim)) * HALF_BYTES,
        flop=2 * rows * factor_numbers // slots.count,
        tunings=low_rank_tunings(usual_rows_per_tile(rows), slots.max_rank),
        is_plain_capturable=False,
    )
