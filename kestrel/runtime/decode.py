"""Decoding in batches of fixed size, with nothing to decide on the host: on a GPU each size is a captured CUDA graph.

A batch is padded to the next size with the table's spare row. What rows ask for decides which parts run
(`DecodeParts`). Which adapter a row uses, and what it wishes about its scores, is read from tables on the device; masks
of structured answers are there before the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from kestrel.grammar import Carries
from kestrel.kernels.ops import Ops
from kestrel.kernels.row_tables import COORD, SIZE, RowInputs
from kestrel.kernels.sampling import allowed_scores
from kestrel.models.contract import DecoderModel
from kestrel.runtime.adapter_slots import AdapterSlots, SlotAdapt
from kestrel.runtime.attention import PagedKVCache, RowAttention
from kestrel.runtime.contract import DecodeRow
from kestrel.runtime.device import staged, upload
from kestrel.runtime.graph_pool import GraphPool, Replayable
from kestrel.runtime.rows import RowTable
from kestrel.runtime.sampler import (
    Sampled,
    note_emitted,
    region_heads,
    wanted_logprobs,
    wanted_values,
    with_logprobs,
)


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
    wishes: int = 0
    """What rows wish about their scores, as bits of `ScoreWishes.kinds_R`."""
    num_logprobs: int | None = None
    """Of the most likely ids, where some row wants log-probabilities: at least as many as any row wants."""


NUMBERS_OF_LOGPROBS = (0, 20)
"""What is captured; more are as many as were asked for."""
MAX_CAPTURED = 256
"""Steps, and as many samplings; others are launched kernel by kernel, so that odd mixtures do not fill the memory."""


def parts_for(table: RowTable, rows: list[int]) -> DecodeParts:
    host = [table.host[row] for row in rows]
    num_logprobs = wanted_logprobs(host)
    if num_logprobs is not None:
        num_logprobs = next((number for number in NUMBERS_OF_LOGPROBS if number >= num_logprobs), num_logprobs)
    return DecodeParts(
        carries=wanted_values(host),
        draws=any(row.samples_randomly for row in host),
        has_endings=table.endings.any_among(rows),
        is_adapted=any(row.adapter_slot is not None for row in host),
        wishes=table.wishes.among(rows),
        num_logprobs=num_logprobs,
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
        rows_B, positions_B = self.inputs(decode).to(self._table.device, non_blocking=True)
        size = self.size_for(len(decode))
        return first_rows(self.step(rows_B[:size], positions_B[:size], parts), len(decode))

    def sample(self, hidden_BD: Tensor, rows: list[int], parts: DecodeParts) -> Sampled:
        """The end of a step alone, for rows whose hidden states come from elsewhere."""
        return first_rows(self.sample_step(*self.sample_inputs(hidden_BD, rows), parts), len(rows))

    def sample_inputs(self, hidden_BD: Tensor, rows: list[int]) -> tuple[Tensor, Tensor]:
        missing = self.size_for(len(rows)) - len(rows)
        rows_B = upload([*rows, *[self._table.spare_row] * missing], self._table.device)
        return functional.pad(hidden_BD, (0, 0, 0, missing)), rows_B

    def inputs(self, decode: list[DecodeRow]) -> Tensor:
        """Rows and positions of a batch of the next size, [2, size], on the host. Of two at least: so both lie at
        multiples of 16 bytes, as kernels are compiled for."""
        missing = max(self.size_for(len(decode)), 2) - len(decode)
        numbers = [
            [*(one.row for one in decode), *[self._table.spare_row] * missing],
            [*(one.position for one in decode), *[0] * missing],
        ]
        return staged(numbers, self._table.device)

    def size_for(self, num_rows: int) -> int:
        return next(size for size in self._sizes if size >= num_rows)

    def step(self, rows_B: Tensor, positions_B: Tensor, parts: DecodeParts) -> Sampled:
        """The whole step as device work alone. Leaves the positions after these in `positions_B`."""
        table, kv = self._table, self._kv
        inputs = self._ops.row_inputs(rows_B, positions_B, table.pages, table.tensors, kv.page_size, positions_B)
        attend = RowAttention(kv, self._ops, inputs.slots_B, inputs.pages_BP, inputs.num_keys_B)
        adapt = None
        if parts.is_adapted:
            assert self._adapters is not None
            adapt = SlotAdapt(self._adapters, table.tensors.adapter_slot[rows_B], self._ops)
        hidden_BD = self._model.forward(self._embed(inputs, parts), inputs.positions_B, attend, adapt)
        return self.sample_step(hidden_BD, rows_B, parts)

    def _embed(self, inputs: RowInputs, parts: DecodeParts) -> Tensor:
        """Of the rows' last tokens."""
        regions, kind_B1, value_B2 = self._model.regions, inputs.last_kind_B[:, None], inputs.last_value_B2
        x_BD = self._model.embed_text(inputs.last_id_B)
        if regions is not None and parts.carries & Carries.COORD:
            x_BD = torch.where(kind_B1 == COORD, regions.embed_coords(value_B2[:, 0]).to(x_BD.dtype), x_BD)
        if regions is not None and parts.carries & Carries.SIZE:
            x_BD = torch.where(kind_B1 == SIZE, regions.embed_sizes(value_B2).to(x_BD.dtype), x_BD)
        return x_BD

    def sample_step(self, hidden_BD: Tensor, rows_B: Tensor, parts: DecodeParts) -> Sampled:
        """From hidden states to what each row emits, as device work alone."""
        table = self._table
        endings = table.endings.tensors if parts.has_endings else None
        tables = (table.tensors, table.grammars.tensors, endings)
        scores_BV = logits_BV = self._model.logits(hidden_BD)
        if parts.wishes:
            scores_BV = self._ops.weigh_ids(logits_BV, rows_B, table.wishes.tensors(parts.wishes))
        if parts.draws:
            ranks_SBC = self._ops.draw_ids(allowed_scores(scores_BV, rows_B, *tables), rows_B, table.tensors)
        else:
            ranks_SBC = self._ops.best_ids(scores_BV, rows_B, *tables)
        region = region_heads(self._model, parts.carries, hidden_BD, logits_BV, table, rows_B)
        sampled = Sampled(*self._ops.commit_ids(ranks_SBC, rows_B, *tables, region))
        note_emitted(table, parts.wishes, rows_B, sampled)
        return with_logprobs(sampled, logits_BV, parts.num_logprobs)


def first_rows(sampled: Sampled, num_rows: int) -> Sampled:
    optional = sampled.values_B3, sampled.chosen_logprob_B, sampled.top_logprob_BK, sampled.top_id_BK
    cut = (None if tensor is None else tensor[:num_rows] for tensor in optional)
    return Sampled(sampled.integers_B5[:num_rows], *cut)


# ---------------------------------------------------------------------- captured


@dataclass(frozen=True, slots=True)
class CapturedStep:
    graph: Replayable
    inputs: tuple[Tensor, ...]
    sampled: Sampled

    def run(self, *inputs: Tensor) -> Sampled:
        """Without inputs: with what the run before has left in their place."""
        if inputs:
            for own, given in zip(self.inputs, inputs, strict=True):
                own.copy_(given, non_blocking=True)
        self.graph.replay()
        return self.sampled


def goes_on(decode: list[DecodeRow], before: list[DecodeRow]) -> bool:
    """Whether these are the rows of before, each one position further."""
    return len(decode) == len(before) and all(
        now.row == then.row and now.position == then.position + 1 for now, then in zip(decode, before, strict=True)
    )


class DecodeGraphs(FixedDecode):
    """A graph per batch size and set of parts. The grammar tables may move: then all are captured anew.

    What a run returns is overwritten by the next replay: copy it on the same stream.
    """

    def __init__(
        self,
        model: DecoderModel,
        kv: PagedKVCache,
        table: RowTable,
        ops: Ops,
        sizes: Sequence[int],
        pool: GraphPool,
        adapters: AdapterSlots | None = None,
    ) -> None:
        super().__init__(model, kv, table, ops, sizes, adapters)
        self._pool = pool
        self._steps: dict[tuple[int, DecodeParts], CapturedStep] = {}
        self._samplings: dict[tuple[int, DecodeParts], CapturedStep] = {}
        self._steps_run: set[tuple[int, DecodeParts]] = set()
        self._samplings_run: set[tuple[int, DecodeParts]] = set()
        self._version = table.grammars.version
        self._ran: dict[tuple[int, DecodeParts], list[DecodeRow]] = {}
        """What each step ran last, where no place was filled up: its inputs are ready for the positions after these."""

    def prepare(self) -> None:
        """Captures what plain texts need, in every size, greedy or drawn. The largest first, whose memory suffices for
        the others."""
        for size in reversed(self._sizes):
            for draws in (False, True):
                key = (size, DecodeParts(Carries.NOTHING, draws, has_endings=False))
                self._steps[key] = self.capture(*key)
                self._samplings[key] = self._capture_sampling(*key)

    def run(self, decode: list[DecodeRow], parts: DecodeParts) -> Sampled:
        self._drop_outdated()
        key = (self.size_for(len(decode)), parts)
        if key not in self._steps:
            if key not in self._steps_run or len(self._steps) >= MAX_CAPTURED:
                sampled = super().run(decode, parts)
                self._steps_run.add(key)
                return sampled
            self._steps[key] = self.capture(*key, has_run=True)
        # A copy from the host keeps the GPU waiting for 3 µs between two steps.
        inputs = () if goes_on(decode, self._ran.pop(key, [])) else (self.inputs(decode),)
        sampled = self._steps[key].run(*inputs)
        if len(decode) == key[0]:
            self._ran[key] = decode
        return first_rows(sampled, len(decode))

    def sample(self, hidden_BD: Tensor, rows: list[int], parts: DecodeParts) -> Sampled:
        self._drop_outdated()
        key = (self.size_for(len(rows)), replace(parts, is_adapted=False))
        if key not in self._samplings:
            if key not in self._samplings_run or len(self._samplings) >= MAX_CAPTURED:
                sampled = super().sample(hidden_BD, rows, parts)
                self._samplings_run.add(key)
                return sampled
            self._samplings[key] = self._capture_sampling(*key, has_run=True)
        return first_rows(self._samplings[key].run(*self.sample_inputs(hidden_BD, rows)), len(rows))

    def capture(self, size: int, parts: DecodeParts, has_run: bool = False) -> CapturedStep:
        """Every entry is the spare row while it is tried out and recorded, so nobody's state is touched."""
        numbers_2B = torch.stack((self._spare_rows(max(size, 2)), self._spare_rows(max(size, 2)).zero_()))
        rows_B, positions_B = numbers_2B[:, :size]
        graph, sampled = self._pool.capture(lambda: self.step(rows_B, positions_B, parts), has_run)
        return CapturedStep(graph, (numbers_2B,), sampled)

    def _capture_sampling(self, size: int, parts: DecodeParts, has_run: bool = False) -> CapturedStep:
        rows_B = self._spare_rows(size)
        hidden_BD = torch.zeros(size, self._model.shape.hidden_dim, dtype=self._model.dtype, device=rows_B.device)
        graph, sampled = self._pool.capture(lambda: self.sample_step(hidden_BD, rows_B, parts), has_run)
        return CapturedStep(graph, (hidden_BD, rows_B), sampled)

    def _spare_rows(self, size: int) -> Tensor:
        return torch.full((size,), self._table.spare_row, dtype=torch.int64, device=self._table.device)

    def _drop_outdated(self) -> None:
        if self._version != self._table.grammars.version:
            # Tables of another width need kernels of their own, which must not be compiled inside a capture.
            for known in (self._steps, self._samplings, self._steps_run, self._samplings_run, self._ran):
                known.clear()
            self._version = self._table.grammars.version
