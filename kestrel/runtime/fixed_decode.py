"""Decoding in batches of fixed size, with nothing to decide on the host: on a GPU each size is captured as a graph.

A batch is filled up to the next size with the table's spare row. What rows wish for decides which parts run
(`DecodeParts`); wishes that need the host in every step (penalties, masks, log-probabilities …) are not served here:
`parts_for` says so, and the step runs as usual. Which adapter a row uses is read from the table on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kestrel.grammar import Carries
from kestrel.kernels.best_ids import allowed_scores
from kestrel.kernels.ops import Ops
from kestrel.kernels.row_inputs import RowInputs
from kestrel.kernels.row_tables import COORD, SIZE
from kestrel.models.contract import DecoderModel
from kestrel.runtime.adapter_slots import AdapterSlots, SlotAdapt
from kestrel.runtime.contract import DecodeRow, StepPlan
from kestrel.runtime.kv_cache import PagedKVCache
from kestrel.runtime.rows import RowTable
from kestrel.runtime.sampler import Sampled, region_heads, wanted_values
from kestrel.runtime.step_attention import RowAttention
from kestrel.runtime.upload import upload


@dataclass(frozen=True, slots=True)
class DecodeParts:
    """What a batch needs beside the plain step."""

    carries: Carries
    draws: bool
    """Some row samples."""
    has_endings: bool
    """Some row has a wish about its end."""
    is_adapted: bool = False
    """Some row uses an adapter."""


def parts_for(table: RowTable, rows: list[int], plan: StepPlan) -> DecodeParts | None:
    """None when some of these rows wishes for what only the usual step can do."""
    host = [table.host[row] for row in rows]
    unusual = any(row.logprobs is not None or row.has_id_limits for row in host)
    weighed = table.penalties.any_among(rows) or table.logit_bias.any_among(rows)
    if unusual or weighed or any(row in plan.masks for row in rows):
        return None
    return DecodeParts(
        carries=wanted_values(host),
        draws=any(row.samples_randomly for row in host),
        has_endings=table.endings.any_among(rows),
        is_adapted=any(row.adapter_slot is not None for row in host),
    )


class FixedDecode:
    """`run` gives what the usual step would, for batches of at most the largest size."""

    def __init__(
        self,
        model: DecoderModel,
        kv: PagedKVCache,
        table: RowTable,
        ops: Ops,
        sizes: Sequence[int],
        adapters: AdapterSlots | None = None,
    ) -> None:
        """Without `adapters`, rows that use one are not served."""
        self._adapters = adapters
        self._model = model
        self._kv = kv
        self._table = table
        self._ops = ops
        self._sizes = sorted(sizes)

    def prepare(self) -> None:
        """Whatever can be done before the first request; nothing here."""

    def serves(self, parts: DecodeParts) -> bool:
        return self._adapters is not None or not parts.is_adapted

    def run(self, decode: list[DecodeRow], parts: DecodeParts) -> Sampled:
        rows_B, positions_B = self.inputs(decode)
        sampled = self.step(rows_B, positions_B, parts)
        return first_rows(sampled, len(decode))

    def sample(self, hidden_BD: Tensor, rows: list[int], parts: DecodeParts) -> Sampled:
        """The end of a step alone, for rows whose hidden states come from elsewhere."""
        return first_rows(self.sample_step(*self.sample_inputs(hidden_BD, rows), parts), len(rows))

    def sample_inputs(self, hidden_BD: Tensor, rows: list[int]) -> tuple[Tensor, Tensor]:
        missing = self.size_for(len(rows)) - len(rows)
        rows_B = upload([*rows, *[self._table.spare_row] * missing], self._table.device)
        return functional.pad(hidden_BD, (0, 0, 0, missing)), rows_B

    def inputs(self, decode: list[DecodeRow]) -> tuple[Tensor, Tensor]:
        """Rows and positions of a batch of the next size, at multiples of 16 bytes, as kernels are compiled for."""
        size = self.size_for(len(decode))
        missing = max(size, 2) - len(decode)
        numbers = [
            [*(one.row for one in decode), *[self._table.spare_row] * missing],
            [*(one.position for one in decode), *[0] * missing],
        ]
        rows_B, positions_B = upload(numbers, self._table.device).unbind(0)
        return rows_B[:size], positions_B[:size]

    def size_for(self, num_rows: int) -> int:
        return next(size for size in self._sizes if size >= num_rows)

    def step(self, rows_B: Tensor, positions_B: Tensor, parts: DecodeParts) -> Sampled:
        """The whole step as device work alone."""
        table, kv = self._table, self._kv
        inputs = self._ops.row_inputs(rows_B, positions_B, table.pages, table.tensors, kv.page_size)
        attend = RowAttention(kv, self._ops, inputs.slots_B, inputs.pages_BP, inputs.num_keys_B)
        adapt = None
        if parts.is_adapted:
            assert self._adapters is not None
            adapt = SlotAdapt(self._adapters, table.tensors.adapter_slot[rows_B], self._ops)
        hidden_BD = self._model.forward(self._embed(inputs, parts), positions_B, attend, adapt)
        return self.sample_step(hidden_BD, rows_B, parts)

    def _embed(self, inputs: RowInputs, parts: DecodeParts) -> Tensor:
        """Of the rows' last tokens."""
        model, kind_B1, value_B2 = self._model, inputs.last_kind_B[:, None], inputs.last_value_B2
        x_BD = model.embed_text(inputs.last_id_B)
        if parts.carries & Carries.COORD:
            x_BD = torch.where(kind_B1 == COORD, model.embed_coords(value_B2[:, 0]).to(x_BD.dtype), x_BD)
        if parts.carries & Carries.SIZE:
            x_BD = torch.where(kind_B1 == SIZE, model.embed_sizes(value_B2).to(x_BD.dtype), x_BD)
        return x_BD

    def sample_step(self, hidden_BD: Tensor, rows_B: Tensor, parts: DecodeParts) -> Sampled:
        """From hidden states to what each row emits, as device work alone."""
        table = self._table
        endings = table.endings.tensors if parts.has_endings else None
        tables = (table.tensors, table.grammars.tensors, endings)
        logits_BV = self._model.logits(hidden_BD)
        if parts.draws:
            ranks_SBC = self._ops.draw_ids(allowed_scores(logits_BV, rows_B, *tables), rows_B, table.tensors)
        else:
            ranks_SBC = self._ops.best_ids(logits_BV, rows_B, *tables)
        region = region_heads(self._model, parts.carries, hidden_BD)
        return Sampled(*self._ops.commit_ids(ranks_SBC, rows_B, *tables, region))


def first_rows(sampled: Sampled, num_rows: int) -> Sampled:
    return Sampled(sampled.integers_B5[:num_rows], sampled.values_B2[:num_rows])
