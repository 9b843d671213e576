"""Attention of one step over the paged cache, behind `kestrel.layers.attention.Attend`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kestrel.kernels.ops import Ops
from kestrel.kernels.paged_attention import write_kv
from kestrel.layers.attention import Heads
from kestrel.runtime.contract import DecodeRow, PrefillChunk
from kestrel.runtime.device import upload
from kestrel.runtime.grouped_attention import (
    SHORT,
    AttentionGroup,
    LayerInputs,
    RowQueries,
    is_picture,
    padded_groups,
    prefill_groups,
)
from kestrel.runtime.kv_cache import PagedKVCache
from kestrel.runtime.rows import RowTable


@dataclass(frozen=True, slots=True)
class RowAttention:
    """One new position per row, and nothing for the host to decide: what fixed decode steps are captured with."""

    kv: PagedKVCache
    ops: Ops
    slots_T: Tensor
    pages_BP: Tensor
    num_keys_B: Tensor

    def __call__(self, layer: int, heads: Heads, out_TD: Tensor | None = None) -> Tensor:
        return stored_and_attended(self, layer, heads, out_TD)

    def attend_stored(self, layer: int, q_THD: Tensor, out_THD: Tensor) -> None:
        self.ops.attend_rows(
            q_THD, *self.kv.layer(layer), self.pages_BP, self.num_keys_B, self.kv.page_size, *self.kv.scales(layer),
            out_BHD=out_THD,
        )  # fmt: skip


class ChunkNumbers(NamedTuple):
    """Where a chunk lies in the flat batch and in its row."""

    first: int
    num_positions: int
    start: int
    sees_all: int
    row: int


def long_and_short(chunks: Sequence[PrefillChunk]) -> tuple[list[ChunkNumbers], list[ChunkNumbers]]:
    """Apart from each other: blocks of queries that suit the ones are mostly empty for the others."""
    long: list[ChunkNumbers] = []
    short: list[ChunkNumbers] = []
    first = 0
    for chunk in chunks:
        numbers = ChunkNumbers(first, chunk.num_positions, chunk.start, int(is_picture(chunk)), chunk.row)
        (long if chunk.num_positions > SHORT else short).append(numbers)
        first += chunk.num_positions
    return long, short


@dataclass(frozen=True, slots=True)
class StoredChunks:
    """Chunks as `attend_chunks` takes them."""

    pages_CP: Tensor
    first_C: Tensor
    count_C: Tensor
    start_C: Tensor
    sees_all_C: Tensor
    max_count: int

    @classmethod
    def of_numbers(cls, numbers_5C: Tensor, table: RowTable, max_count: int) -> StoredChunks:
        first_C, count_C, start_C, sees_all_C, row_C = numbers_5C.unbind(0)
        return cls(table.pages[row_C], first_C, count_C, start_C, sees_all_C, max_count)

    @classmethod
    def of(cls, chunks: Sequence[ChunkNumbers], table: RowTable) -> StoredChunks:
        numbers_5C = upload(list(zip(*chunks, strict=True)), table.device)
        return cls.of_numbers(numbers_5C, table, max(chunk.num_positions for chunk in chunks))


@dataclass(frozen=True, slots=True)
class ChunkAttention:
    """Chunks alone, and nothing for the host to decide: what prefill steps are captured with."""

    kv: PagedKVCache
    ops: Ops
    slots_T: Tensor
    chunks: list[StoredChunks]

    @classmethod
    def of_positions(
        cls,
        kv: PagedKVCache,
        ops: Ops,
        table: RowTable,
        rows_T: Tensor,
        positions_T: Tensor,
        chunks: list[StoredChunks],
    ) -> ChunkAttention:
        return cls(kv, ops, slots_of(table, kv.page_size, rows_T, positions_T), chunks)

    def __call__(self, layer: int, heads: Heads, out_TD: Tensor | None = None) -> Tensor:
        return stored_and_attended(self, layer, heads, out_TD)

    def attend_stored(self, layer: int, q_THD: Tensor, out_THD: Tensor) -> None:
        for chunks in self.chunks:
            self.ops.attend_chunks(
                q_THD, *self.kv.layer(layer), chunks.pages_CP, chunks.first_C, chunks.count_C, chunks.start_C,
                chunks.sees_all_C, self.kv.page_size, chunks.max_count, *self.kv.scales(layer), out_THD=out_THD,
            )  # fmt: skip


class FlatAttention:
    """Any chunks, then one position for each of any decoding rows. `prefill` is in packed order.

    With `by_kernels` the operations of a bundle read pages as they lie; otherwise torch's attention runs over groups of
    alike rows.
    """

    def __init__(
        self,
        kv: PagedKVCache,
        table: RowTable,
        ops: Ops,
        prefill: list[PrefillChunk],
        decode: list[DecodeRow],
        rows_T: Tensor,
        positions_T: Tensor,
        by_kernels: bool,
    ) -> None:
        self.kv = kv
        self.slots_T = slots_of(table, kv.page_size, rows_T, positions_T)
        self._table = table
        self._ops = ops
        self._prefill = prefill
        self._decode = decode
        self._rows_T = rows_T
        self._positions_T = positions_T
        self._first_decode = len(positions_T) - len(decode)
        self._by_kernels = by_kernels

    def __call__(self, layer: int, heads: Heads, out_TD: Tensor | None = None) -> Tensor:
        if self._by_kernels:
            return stored_and_attended(self, layer, heads, out_TD)
        q_THD, k_THD, v_THD = heads.rotated()
        (k_cache, v_cache), scales = self.kv.layer(layer), self.kv.scales(layer)
        write_kv(k_cache, v_cache, self.slots_T, k_THD, v_THD, *scales)
        out_THD = torch.empty_like(q_THD) if out_TD is None else out_TD.unflatten(1, q_THD.shape[1:])
        layer_inputs = LayerInputs(q_THD, k_THD, v_THD, k_cache, v_cache, *scales)
        for group in self._groups:
            group.attend(layer_inputs, out_THD)
        return out_THD.flatten(1) if out_TD is None else out_TD

    def attend_stored(self, layer: int, q_THD: Tensor, out_THD: Tensor) -> None:
        self._stored_chunks.attend_stored(layer, q_THD, out_THD)
        if self._decode:
            rows = slice(self._first_decode, None)
            self._stored_rows.attend_stored(layer, q_THD[rows], out_THD[rows])

    @cached_property
    def _groups(self) -> list[AttentionGroup]:
        decoding = enumerate(self._decode, self._first_decode)
        rows = [RowQueries(at, 1, one.position, one.row) for at, one in decoding]
        where = (self._table, self.kv.page_size, self._slots)
        return [*prefill_groups(self._prefill, *where), *padded_groups(rows, *where)]

    @cached_property
    def _stored_chunks(self) -> ChunkAttention:
        groups = [StoredChunks.of(chunks, self._table) for chunks in long_and_short(self._prefill) if chunks]
        return ChunkAttention(self.kv, self._ops, self.slots_T, groups)

    @cached_property
    def _stored_rows(self) -> RowAttention:
        rows_B, positions_B = self._rows_T[self._first_decode :], self._positions_T[self._first_decode :]
        slots_B = self.slots_T[self._first_decode :]
        return RowAttention(self.kv, self._ops, slots_B, self._table.pages[rows_B], positions_B + 1)

    def _slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        return slots_of(self._table, self.kv.page_size, rows, positions)


class StoredAttention(Protocol):
    """Attention over keys and values that an operation has put in their slots."""

    @property
    def kv(self) -> PagedKVCache: ...

    @property
    def slots_T(self) -> Tensor:
        """Where the keys and values of the new positions go."""
        ...

    def attend_stored(self, layer: int, q_THD: Tensor, out_THD: Tensor) -> None:
        """What the new positions see, once theirs are stored. Rows of both may lie apart."""
        ...


def stored_and_attended(attention: StoredAttention, layer: int, heads: Heads, out_TD: Tensor | None) -> Tensor:
    q_THD = heads.stored(attention.slots_T, attention.kv.layer(layer), attention.kv.scales(layer))
    if out_TD is None:
        out_TD = q_THD.new_empty(len(q_THD), q_THD.shape[1] * q_THD.shape[2])
    attention.attend_stored(layer, q_THD, out_TD.unflatten(1, (-1, q_THD.shape[2])))
    return out_TD


def slots_of(table: RowTable, page_size: int, rows: Tensor, positions: Tensor) -> Tensor:
    """Where the keys and values of these positions lie."""
    return table.pages[rows, positions // page_size] * page_size + positions % page_size
