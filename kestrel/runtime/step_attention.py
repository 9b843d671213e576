"""Attention of one step over the paged cache, behind `kestrel.models.contract.StepAttention`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kestrel.kernels.ops import Ops
from kestrel.kernels.paged_attention import attend_decode, write_kv
from kestrel.runtime.contract import DecodeRow, PrefillChunk
from kestrel.runtime.kv_cache import PagedKVCache
from kestrel.runtime.prefill_attention import SHORT, LayerInputs, is_picture, prefill_groups
from kestrel.runtime.rows import RowTable
from kestrel.runtime.upload import upload


@dataclass(frozen=True, slots=True)
class RowAttention:
    """One new position per row, and nothing for the host to decide: what fixed decode steps are captured with."""

    kv: PagedKVCache
    ops: Ops
    slots_T: Tensor
    pages_BP: Tensor
    num_keys_B: Tensor

    def __call__(self, layer: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> Tensor:
        write_kv(*self.cache(layer), self.slots_T, k_THD, v_THD)
        out_THD = torch.empty_like(q_THD)
        self.attend_stored(layer, q_THD, out_THD)
        return out_THD

    def cache(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.kv.layer(layer)

    def attend_stored(self, layer: int, q_THD: Tensor, out_THD: Tensor) -> None:
        self.ops.attend_rows(
            q_THD, *self.cache(layer), self.pages_BP, self.num_keys_B, self.kv.page_size, out_BHD=out_THD
        )


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
    def of(cls, chunks: Sequence[tuple[int, PrefillChunk]], table: RowTable) -> StoredChunks:
        """`chunks`: each with the place of its first position in the flat batch."""
        numbers = [(first, c.num_positions, c.start, int(is_picture(c)), c.row) for first, c in chunks]
        first_C, count_C, start_C, sees_all_C, row_C = upload(numbers, table.device).t().contiguous().unbind(0)
        longest = max(chunk.num_positions for _, chunk in chunks)
        return cls(table.pages[row_C], first_C, count_C, start_C, sees_all_C, longest)


class FlatAttention:
    """Any chunks, then one position for each of any decoding rows. `prefill` is in packed order."""

    def __init__(
        self,
        kv: PagedKVCache,
        table: RowTable,
        ops: Ops,
        prefill: list[PrefillChunk],
        decode: list[DecodeRow],
        rows_T: Tensor,
        positions_T: Tensor,
    ) -> None:
        self._kv = kv
        self._table = table
        self._ops = ops
        self._prefill = prefill
        self._decode = decode
        self._rows_T = rows_T
        self._positions_T = positions_T
        self._first_decode = len(positions_T) - len(decode)
        self._slots_T = self._slots(rows_T, positions_T)

    @property
    def slots_T(self) -> Tensor:
        return self._slots_T

    def cache(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._kv.layer(layer)

    def __call__(self, layer: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> Tensor:
        k_cache, v_cache = self._kv.layer(layer)
        write_kv(k_cache, v_cache, self._slots_T, k_THD, v_THD)
        out_THD = torch.empty_like(q_THD)
        layer_inputs = LayerInputs(q_THD, k_THD, v_THD, k_cache, v_cache)
        for group in self._groups:
            group.attend(layer_inputs, out_THD)
        if self._decode:
            slots_BK, mask_BK = self._decode_keys
            q_BHD = q_THD[self._first_decode :]
            out_THD[self._first_decode :] = attend_decode(q_BHD, k_cache, v_cache, slots_BK, mask_BK)
        return out_THD

    def attend_stored(self, layer: int, q_THD: Tensor, out_THD: Tensor) -> None:
        caches = self._kv.layer(layer)
        for chunks in self._stored_chunks:
            self._ops.attend_chunks(
                q_THD, *caches, chunks.pages_CP, chunks.first_C, chunks.count_C, chunks.start_C, chunks.sees_all_C,
                self._kv.page_size, chunks.max_count, out_THD=out_THD,
            )  # fmt: skip
        if self._decode:
            rows = slice(self._first_decode, None)
            self._stored_rows.attend_stored(layer, q_THD[rows], out_THD[rows])

    @cached_property
    def _groups(self):
        return prefill_groups(self._prefill, self._slots, self._table.device)

    @cached_property
    def _decode_keys(self) -> tuple[Tensor, Tensor]:
        rows_B1 = self._rows_T[self._first_decode :, None]
        positions_B1 = self._positions_T[self._first_decode :, None]
        keys_1K = torch.arange(max(one.position for one in self._decode) + 1, device=self._table.device)[None]
        mask_BK = keys_1K <= positions_B1
        # Past a row's end its page table is stale: read its first position there, whose values are finite.
        return self._slots(rows_B1, torch.where(mask_BK, keys_1K, 0)), mask_BK

    @cached_property
    def _stored_chunks(self) -> list[StoredChunks]:
        """Long and short chunks apart: blocks of queries that suit the ones are mostly empty for the others."""
        placed, first = [], 0
        for chunk in self._prefill:
            placed.append((first, chunk))
            first += chunk.num_positions
        long = [one for one in placed if one[1].num_positions > SHORT]
        short = [one for one in placed if one[1].num_positions <= SHORT]
        return [StoredChunks.of(chunks, self._table) for chunks in (long, short) if chunks]

    @cached_property
    def _stored_rows(self) -> RowAttention:
        rows_B, positions_B = self._rows_T[self._first_decode :], self._positions_T[self._first_decode :]
        return RowAttention(self._kv, self._ops, rows_B, self._table.pages[rows_B], positions_B + 1)

    def _slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        page_size = self._kv.page_size
        pages = self._table.pages[rows, positions // page_size]
        return pages * page_size + positions % page_size
