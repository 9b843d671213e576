"""Attention of a step over the paged cache, behind `kestrel.layers.attention.Attend`.

The key/value tensors of all layers, attention by torch's own routine in groups of positions, and by the kernels of the
bundle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, takewhile
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kestrel.kernels.ops import Ops
from kestrel.kernels.paged_attention import (
    as_pages,
    attend_joined,
    attend_padded,
    attend_segment,
    attend_shared,
    causal_mask,
    join_keys,
    write_kv,
)
from kestrel.layers.attention import Heads
from kestrel.models.contract import DecoderShape
from kestrel.runtime.contract import DecodeRow, PageCopy, PrefillChunk
from kestrel.runtime.device import upload
from kestrel.runtime.rows import RowTable
from kestrel.tokens import ImageSpan


class PagedKVCache:
    """Per layer [num_pages + 1, page_size, kv_heads, head_dim]; slot of a position = page · page_size + offset.

    The page after the last belongs to nobody: positions that only fill up a batch write there.
    """

    def __init__(
        self,
        shape: DecoderShape,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Sequence[tuple[float, float]] = (),
    ) -> None:
        """`scales` of keys and values by layer are for float8; without them numbers are kept as they are."""
        assert not scales or (dtype.itemsize == 1 and len(scales) == shape.num_layers)
        self.num_pages = num_pages
        self._scales = scales or [(1.0, 1.0)] * shape.num_layers
        self.page_size = page_size
        size = (shape.num_layers, num_pages + 1, page_size, shape.num_kv_heads, shape.head_dim)
        self._k = as_pages(_zeros(size, dtype, device))
        self._v = as_pages(_zeros(size, dtype, device))
        self._layers = list(zip(self._k, self._v, strict=True))

    @property
    def spare_page(self) -> int:
        return self.num_pages

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self._layers[index]

    def scales(self, index: int) -> tuple[float, float]:
        """Stored keys and values times these are the keys and values of the layer."""
        return self._scales[index]

    def copy_pages(self, copies: list[PageCopy]) -> None:
        if not copies:
            return
        pages = upload([(copy.source, copy.target) for copy in copies], self._k.device)
        for numbers in (self._k, self._v):
            # float8 as bytes, which can be indexed on every device.
            cache = numbers.view(torch.uint8) if numbers.dtype.itemsize == 1 else numbers
            cache[:, pages[:, 1]] = cache[:, pages[:, 0]]


def bytes_per_page(shape: DecoderShape, page_size: int, dtype: torch.dtype) -> int:
    return 2 * shape.num_layers * page_size * shape.num_kv_heads * shape.head_dim * dtype.itemsize


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, not empty: masked slots are multiplied by a zero weight, which garbage NaNs would survive.

    On a CPU the operating system hands zero pages out as they are first touched, so an unused cache costs nothing.
    """
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    untouched = np.zeros(math.prod(size) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(untouched).view(dtype).view(size)


# ---------------------------------------------------------------------- by torch's own routine
# Groups of positions that are attended to in one call each:
# - Pictures at the beginning of their context, which see themselves and nothing else: one call for all of a length.
# - Short texts (a question behind its picture) and decoding rows: padded to the longest, one call for all, or one for
#   all about a picture.
# - What is left (long texts, later pictures): a call each.
#
# Rows that begin with the same pages, such as questions about one picture, are apart: keys and values of these pages
# are read once for all of them. On a CPU only, where reading them is most of the work.


SlotsOf: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(rows, positions) to the slots where their keys and values lie."""


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What one layer hands over: the flat new positions, and the cache that already holds them."""

    q_THD: Tensor
    k_THD: Tensor
    v_THD: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k_scale: float
    v_scale: float


class AttentionGroup(Protocol):
    def attend(self, layer: LayerInputs, out_THD: Tensor) -> None:
        """Writes the outputs of the group's positions."""
        ...


# ---------------------------------------------------------------------- rows padded to the longest


LEAST_ROWS = 4
LEAST_SHARED = 256
"""Fewer rows, or positions that they share, are as fast each for itself."""
FEW_QUERIES = 32
"""Of all rows: they are the faster in few operations, from two rows on."""
MOST_QUERIES = 256
"""Of more of them, padded ones included, the scores would take much memory at once."""


@dataclass(frozen=True, slots=True)
class RowQueries:
    """New positions of one row, side by side in the flat batch."""

    first: int
    """Where they begin there."""
    count: int
    start: int
    """Positions of the row before them."""
    row: int


@dataclass(frozen=True, slots=True)
class PaddedKeys:
    at_NQ: Tensor
    """Where the queries lie in the flat batch; a row of fewer repeats its last one."""
    slots_NK: Tensor
    mask_NQK: Tensor

    @classmethod
    def of(cls, rows: Sequence[RowQueries], first_key: int, slots_of: SlotsOf, device: torch.device) -> PaddedKeys:
        """Keys from position `first_key` on."""
        num_queries, num_keys = max(one.count for one in rows), max(one.start + one.count for one in rows)
        numbers = [(one.first, one.count, one.start, one.row) for one in rows]
        first_N1, count_N1, start_N1, row_N1 = upload(numbers, device)[:, :, None].unbind(1)
        query_NQ = torch.arange(num_queries, device=device)[None].minimum(count_N1 - 1)
        key_1K = torch.arange(first_key, num_keys, device=device)[None]
        mask_NQK = key_1K[:, None] <= (start_N1 + query_NQ)[:, :, None]
        # Past a row's own positions its page table is stale: read its first position there, whose values are finite.
        known_NK = torch.where(key_1K < start_N1 + count_N1, key_1K, 0)
        return cls(first_N1 + query_NQ, slots_of(row_N1.expand_as(known_NK), known_NK), mask_NQK)


@dataclass(frozen=True, slots=True)
class PaddedRows:
    keys: PaddedKeys

    def attend(self, layer: LayerInputs, out_THD: Tensor) -> None:
        keys = self.keys
        out_THD[keys.at_NQ] = attend_padded(
            layer.q_THD[keys.at_NQ], layer.k_cache, layer.v_cache, keys.slots_NK, keys.mask_NQK,
            layer.k_scale, layer.v_scale,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SharedRows:
    shared_slots_S: Tensor
    own: PaddedKeys

    def attend(self, layer: LayerInputs, out_THD: Tensor) -> None:
        own = self.own
        out_THD[own.at_NQ] = attend_shared(
            layer.q_THD[own.at_NQ], layer.k_cache, layer.v_cache, self.shared_slots_S, own.slots_NK, own.mask_NQK,
            layer.k_scale, layer.v_scale,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class JoinedRows:
    apart: SharedRows
    slots_L: Tensor
    bias_ML: Tensor

    @classmethod
    def of(cls, apart: SharedRows) -> JoinedRows:
        return cls(apart, *join_keys(apart.shared_slots_S, apart.own.slots_NK, apart.own.mask_NQK))

    def attend(self, layer: LayerInputs, out_THD: Tensor) -> None:
        at_NQ = self.apart.own.at_NQ
        seen_NQHD = attend_joined(
            layer.q_THD[at_NQ], layer.k_cache, layer.v_cache, self.slots_L, self.bias_ML, layer.k_scale, layer.v_scale
        )
        if seen_NQHD.isfinite().all():
            out_THD[at_NQ] = seen_NQHD
        else:  # zero times infinity: a row that has such numbers must not spoil its neighbours
            self.apart.attend(layer, out_THD)


def padded_groups(
    rows: Sequence[RowQueries], table: RowTable, page_size: int, slots_of: SlotsOf
) -> Iterator[AttentionGroup]:
    """Rows that share enough with others in groups of their own, all others in one."""
    taken: set[RowQueries] = set()
    for together, num_shared in _sharing(rows, table, page_size) if table.device.type == "cpu" else ():
        taken.update(together)
        key_S = torch.arange(num_shared)
        shared_slots_S = slots_of(torch.full_like(key_S, together[0].row), key_S)
        own = PaddedKeys.of(together, num_shared, slots_of, table.device)
        is_small = own.at_NQ.numel() <= FEW_QUERIES and own.slots_NK.numel() <= num_shared
        apart = SharedRows(shared_slots_S, own)
        yield JoinedRows.of(apart) if is_small else apart
    left = [one for one in rows if one not in taken]
    if len(left) == 1 and left[0].count == 1:
        yield OneChunk.of_row(left[0], slots_of, table.device)
    elif left:
        yield PaddedRows(PaddedKeys.of(left, 0, slots_of, table.device))


def _sharing(rows: Sequence[RowQueries], table: RowTable, page_size: int) -> Iterator[tuple[list[RowQueries], int]]:
    """Rows with the same first pages, and how many positions these hold: none that a row has yet to write."""
    least_pages = -(-LEAST_SHARED // page_size)
    long = [one for one in rows if one.start >= least_pages * page_size]
    if len(long) < 2:
        return
    pages = {one: table.pages[one.row, : one.start // page_size].tolist() for one in long}
    begin = lambda one: pages[one][:least_pages]  # noqa: E731
    for _, same in groupby(sorted(long, key=begin), key=begin):
        together = list(same)
        num_queries = len(together) * max(one.count for one in together)
        least_rows = 2 if num_queries <= FEW_QUERIES else LEAST_ROWS
        if len(together) < least_rows or num_queries > MOST_QUERIES:
            continue
        columns = zip(*(pages[one] for one in together), strict=False)
        num_pages = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
        yield together, num_pages * page_size


# ---------------------------------------------------------------------- prefill chunks


SHORT = 64
"""Queries of a chunk that is padded to its neighbours."""


def in_packed_order(prefill: list[PrefillChunk]) -> list[PrefillChunk]:
    """Leading pictures first, those of one length side by side; a row's own chunks keep their order."""
    return sorted(prefill, key=lambda chunk: (0, chunk.num_positions) if _is_leading_picture(chunk) else (1, 0))


def prefill_groups(
    prefill: Sequence[PrefillChunk], table: RowTable, page_size: int, slots_of: SlotsOf
) -> list[AttentionGroup]:
    """`prefill` in packed order; its positions lie at the beginning of the flat batch."""
    groups: list[AttentionGroup] = []
    short: list[tuple[int, PrefillChunk]] = []
    first = 0
    for key, chunks in groupby(prefill, lambda chunk: (_is_leading_picture(chunk), chunk.num_positions)):
        is_leading, length = key
        if is_leading:
            count = len(list(chunks))
            groups.append(LeadingPictures(first, count, length))
            first += count * length
            continue
        for chunk in chunks:
            if _is_short(chunk):
                short.append((first, chunk))
            else:
                groups.append(OneChunk.of(first, chunk, slots_of, table.device))
            first += chunk.num_positions
    if len(short) == 1:
        groups.append(OneChunk.of(*short[0], slots_of, table.device))
    elif short:
        queries = [RowQueries(first, chunk.num_positions, chunk.start, chunk.row) for first, chunk in short]
        groups += padded_groups(queries, table, page_size, slots_of)
    return groups


@dataclass(frozen=True, slots=True)
class LeadingPictures:
    first: int
    count: int
    length: int

    def attend(self, layer: LayerInputs, out_THD: Tensor) -> None:
        last = self.first + self.count * self.length
        q, k, v = (
            x_THD[self.first : last].unflatten(0, (self.count, self.length)).transpose(1, 2)
            for x_THD in (layer.q_THD, layer.k_THD.to(layer.q_THD.dtype), layer.v_THD.to(layer.q_THD.dtype))
        )
        seen = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
        out_THD[self.first : last] = seen.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class OneChunk:
    first: int
    last: int
    kv_slots_K: Tensor
    mask_QK: Tensor | None
    is_causal: bool

    @classmethod
    def of(cls, first: int, chunk: PrefillChunk, slots_of: SlotsOf, device: torch.device) -> OneChunk:
        num_keys = chunk.start + chunk.num_positions
        keys_K = torch.arange(num_keys, device=device)
        kv_slots_K = slots_of(torch.full_like(keys_K, chunk.row), keys_K)
        is_span = isinstance(chunk.items[0], ImageSpan)
        is_causal = not is_span and chunk.start == 0
        needs_mask = not is_span and chunk.start > 0 and chunk.num_positions > 1
        mask_QK = causal_mask(chunk.num_positions, num_keys, device) if needs_mask else None
        return cls(first, first + chunk.num_positions, kv_slots_K, mask_QK, is_causal)

    @classmethod
    def of_row(cls, row: RowQueries, slots_of: SlotsOf, device: torch.device) -> OneChunk:
        """A single query, which sees all positions of its row."""
        keys_K = torch.arange(row.start + 1, device=device)
        return cls(row.first, row.first + 1, slots_of(torch.full_like(keys_K, row.row), keys_K), None, False)

    def attend(self, layer: LayerInputs, out_THD: Tensor) -> None:
        q_QHD = layer.q_THD[self.first : self.last]
        out_THD[self.first : self.last] = attend_segment(
            q_QHD, layer.k_cache, layer.v_cache, self.kv_slots_K, self.mask_QK, self.is_causal,
            layer.k_scale, layer.v_scale,
        )  # fmt: skip


def is_picture(chunk: PrefillChunk) -> bool:
    """A picture is a chunk of its own, and all its positions see each other."""
    return isinstance(chunk.items[0], ImageSpan)


def _is_leading_picture(chunk: PrefillChunk) -> bool:
    return chunk.start == 0 and is_picture(chunk)


def _is_short(chunk: PrefillChunk) -> bool:
    return chunk.num_positions <= SHORT and not is_picture(chunk)


# ---------------------------------------------------------------------- of a step


@dataclass(frozen=True, slots=True)
class RowAttention:
    """One new position per row, and nothing for the host to decide: what fixed decode steps are captured with."""

    kv: PagedKVCache
    ops: Ops
    slots_T: Tensor
    pages_BP: Tensor
    num_keys_B: Tensor

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        return stored_and_attended(self, layer, heads)

    def attend_stored(self, layer: int, q_THD: Tensor, out_THD: Tensor) -> None:
        self.ops.attend_rows(
            q_THD, *self.kv.layer(layer), self.pages_BP, self.num_keys_B, *self.kv.scales(layer), out_BHD=out_THD
        )


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

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        return stored_and_attended(self, layer, heads)

    def attend_stored(self, layer: int, q_THD: Tensor, out_THD: Tensor) -> None:
        for chunks in self.chunks:
            self.ops.attend_chunks(
                q_THD, *self.kv.layer(layer), chunks.pages_CP, chunks.first_C, chunks.count_C, chunks.start_C,
                chunks.sees_all_C, chunks.max_count, *self.kv.scales(layer), out_THD=out_THD,
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

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        if self._by_kernels:
            return stored_and_attended(self, layer, heads)
        q_THD, k_THD, v_THD = heads.rotated()
        (k_cache, v_cache), scales = self.kv.layer(layer), self.kv.scales(layer)
        write_kv(k_cache, v_cache, self.slots_T, k_THD, v_THD, *scales)
        out_THD = torch.empty_like(q_THD)
        layer_inputs = LayerInputs(q_THD, k_THD, v_THD, k_cache, v_cache, *scales)
        for group in self._groups:
            group.attend(layer_inputs, out_THD)
        return out_THD.flatten(1)

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


def stored_and_attended(attention: StoredAttention, layer: int, heads: Heads) -> Tensor:
    q_THD = heads.stored(attention.slots_T, attention.kv.layer(layer), attention.kv.scales(layer))
    out_THD = torch.empty_like(q_THD)
    attention.attend_stored(layer, q_THD, out_THD)
    return out_THD.flatten(1)


def slots_of(table: RowTable, page_size: int, rows: Tensor, positions: Tensor) -> Tensor:
    """Where the keys and values of these positions lie."""
    return table.pages[rows, positions // page_size] * page_size + positions % page_size
