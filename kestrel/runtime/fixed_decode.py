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
from kestrel.kernels.ops import Ops
from kestrel.models.contract import DecoderModel, StepAttention
from kestrel.runtime.adapter_slots import AdapterSlots
from kestrel.runtime.contract import DecodeRow, StepPlan
from kestrel.runtime.kv_cache import PagedKVCache
from kestrel.runtime.row_users import Users
from kestrel.runtime.rows import COORD, SIZE, RowTable
from kestrel.runtime.sampler import Sampled, commit_rows, draw_rows, region_values, wanted_values
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
        assert adapters is None or model.can_adapt_on_device
        self._adapters = adapters
        self._model = model
        self._kv = kv
        self._table = table
        self._ops = ops
        self._sizes = sorted(sizes)

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
        """Rows and positions of a batch of the next size."""
        missing = self.size_for(len(decode)) - len(decode)
        spare = self._table.spare_row
        numbers = [
            [*(one.row for one in decode), *[spare] * missing],
            [*(one.position for one in decode), *[0] * missing],
        ]
        rows_B, positions_B = upload(numbers, self._table.device).unbind(0)
        return rows_B, positions_B

    def size_for(self, num_rows: int) -> int:
        return next(size for size in self._sizes if size >= num_rows)

    def step(self, rows_B: Tensor, positions_B: Tensor, parts: DecodeParts) -> Sampled:
        """The whole step as device work alone."""
        pages_BP = self._table.pages[rows_B]
        x_BD, attention = self._embed(rows_B, parts), self._attention(pages_BP, positions_B)
        if parts.is_adapted:
            assert self._adapters is not None
            deltas = self._adapters.deltas(self._table.tensors.adapter_slot[rows_B])
            hidden_BD = self._model.forward_adapted(x_BD, positions_B, attention, deltas)
        else:
            hidden_BD = self._model.forward(x_BD, positions_B, attention)
        return self.sample_step(hidden_BD, rows_B, parts)

    def _embed(self, rows_B: Tensor, parts: DecodeParts) -> Tensor:
        t, model = self._table.tensors, self._model
        x_BD = model.embed_text(t.last_id[rows_B])
        kind_B1, value_B2 = t.last_kind[rows_B][:, None], t.last_value[rows_B]
        if parts.carries & Carries.COORD:
            x_BD = torch.where(kind_B1 == COORD, model.embed_coords(value_B2[:, 0]).to(x_BD.dtype), x_BD)
        if parts.carries & Carries.SIZE:
            x_BD = torch.where(kind_B1 == SIZE, model.embed_sizes(value_B2).to(x_BD.dtype), x_BD)
        return x_BD

    def _attention(self, pages_BP: Tensor, positions_B: Tensor) -> StepAttention:
        page_size = self._kv.page_size
        page_B1 = pages_BP.gather(1, (positions_B // page_size)[:, None])
        slots_B = page_B1[:, 0] * page_size + positions_B % page_size
        return RowAttention(self._kv, self._ops, slots_B, pages_BP, positions_B + 1)

    def sample_step(self, hidden_BD: Tensor, rows_B: Tensor, parts: DecodeParts) -> Sampled:
        """From hidden states to what each row emits, as device work alone."""
        table, t = self._table, self._table.tensors
        all_rows = Users(torch.arange(len(rows_B), device=rows_B.device), rows_B)
        state_B, spent_B = t.state[rows_B], t.spent[rows_B]
        masked_BV = table.grammars.mask(self._model.logits(hidden_BD).float(), state_B)
        if parts.has_endings:
            masked_BV = table.endings.forbid_for(all_rows, masked_BV, state_B, spent_B)
        best_B, greedy_B = masked_BV.max(-1)
        sampled_B = draw_rows(table, rows_B, masked_BV, greedy_B) if parts.draws else greedy_B
        step = table.grammars.advance(state_B, sampled_B, is_spent_B=spent_B >= t.budget[rows_B])
        if parts.has_endings:
            step = table.endings.stop_for(all_rows, step, state_B)
        kind_B, values_B2 = region_values(self._model, parts.carries, hidden_BD, step)
        return commit_rows(table, rows_B, step, best_B, kind_B, values_B2)


def first_rows(sampled: Sampled, num_rows: int) -> Sampled:
    return Sampled(sampled.integers_B5[:num_rows], sampled.values_B2[:num_rows])
