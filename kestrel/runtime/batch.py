"""A step plan as tensors: which positions run, where their keys go, who reads what.

Positions lie flat, prefill chunks first, then one per decoding row.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from kestrel.kernels.ops import Ops
from kestrel.kernels.row_tables import COORD, SIZE
from kestrel.models.contract import DecoderModel, RegionPart
from kestrel.runtime.contract import DecodeRow, PrefillChunk
from kestrel.runtime.device import upload
from kestrel.runtime.kv_cache import PagedKVCache
from kestrel.runtime.rows import RowTable
from kestrel.runtime.step_attention import FlatAttention
from kestrel.tokens import CoordToken, ImageSpan, SizeToken, TextToken


class StepBatch:
    """The tensors of one step, and its attention (`attend` is handed to the model). `prefill` is in packed order."""

    def __init__(
        self,
        kv: PagedKVCache,
        table: RowTable,
        ops: Ops,
        prefill: list[PrefillChunk],
        decode: list[DecodeRow],
        by_kernels: bool,
    ) -> None:
        self._kv, self._table, self._ops, self._by_kernels = kv, table, ops, by_kernels
        self.prefill = prefill
        self.decode = decode
        self.sample_at: list[int] = []
        self.sample_rows: list[int] = []
        self.rows, self.positions = self._lay_out(prefill, decode)

    @cached_property
    def sample_at_B(self) -> Tensor:
        return upload(self.sample_at, self._table.device, torch.int64)

    @cached_property
    def positions_T(self) -> Tensor:
        return upload(self.positions, self._table.device)

    @cached_property
    def attend(self) -> FlatAttention:
        rows_T = upload(self.rows, self._table.device)
        return FlatAttention(
            self._kv, self._table, self._ops, self.prefill, self.decode, rows_T, self.positions_T, self._by_kernels
        )

    def _lay_out(self, prefill: list[PrefillChunk], decode: list[DecodeRow]) -> tuple[list[int], list[int]]:
        rows: list[int] = []
        positions: list[int] = []
        for chunk in prefill:
            rows += [chunk.row] * chunk.num_positions
            positions += range(chunk.start, chunk.start + chunk.num_positions)
            if chunk.samples:
                self.sample_at.append(len(positions) - 1)
                self.sample_rows.append(chunk.row)
        for one in decode:
            rows.append(one.row)
            positions.append(one.position)
            self.sample_at.append(len(positions) - 1)
            self.sample_rows.append(one.row)
        return rows, positions


def embed_prefill(model: DecoderModel, chunks: list[PrefillChunk], images: dict[str, Tensor]) -> list[Tensor]:
    """Embeddings of each chunk; `images` holds the picture embeddings by digest."""
    device = model.device
    embedded: list[Tensor] = []
    for chunk in chunks:
        first = chunk.items[0]
        if isinstance(first, ImageSpan):
            x_TD = images[first.digest]
            if first.bos_id is not None:
                x_TD = torch.cat((model.embed_text(upload([first.bos_id], device)), x_TD))
        else:
            ids = [item.id if isinstance(item, TextToken) else 0 for item in chunk.items]
            x_TD = model.embed_text(upload(ids, device))
            if model.regions is not None:
                x_TD = _with_region_values(model.regions, chunk, x_TD)
        embedded.append(x_TD)
    return embedded


def _with_region_values(regions: RegionPart, chunk: PrefillChunk, x_TD: Tensor) -> Tensor:
    coords = [(i, item.value) for i, item in enumerate(chunk.items) if isinstance(item, CoordToken)]
    sizes = [(i, (item.width, item.height)) for i, item in enumerate(chunk.items) if isinstance(item, SizeToken)]
    for values, embed in ((coords, regions.embed_coords), (sizes, regions.embed_sizes)):
        if values:
            index = upload([i for i, _ in values], x_TD.device)
            value = upload([v for _, v in values], x_TD.device, torch.float32)
            x_TD = x_TD.index_copy(0, index, embed(value).to(x_TD.dtype))
    return x_TD


def embed_decode(model: DecoderModel, table: RowTable, decode: list[DecodeRow]) -> Tensor:
    """Embeddings of the rows' last tokens, which only the device knows."""
    t = table.tensors
    rows_B = upload([one.row for one in decode], table.device)
    x_BD = model.embed_text(t.last_id[rows_B])
    if model.regions is not None and any(table.host[one.row].carries for one in decode):
        kind_B1, value_B2 = t.last_kind[rows_B][:, None], t.last_value[rows_B]
        x_BD = torch.where(kind_B1 == COORD, model.regions.embed_coords(value_B2[:, 0]).to(x_BD.dtype), x_BD)
        x_BD = torch.where(kind_B1 == SIZE, model.regions.embed_sizes(value_B2).to(x_BD.dtype), x_BD)
    return x_BD
