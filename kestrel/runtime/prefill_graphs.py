"""The layers of a prefill step as CUDA graphs: those of single prompts and of a full step captured at the start, others
when they come up for the second time.

A step's positions are filled up to the next size with positions of the spare row, its chunks with empty ones; where
they lie, the graph reads from tensors that are written before each replay. Without this the host, which has a few
hundred kernels to launch, would be slower than the GPU that runs them. While the GPU waits, as at the beginning of a
flood, a step of another form runs in a captured one that has room for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kestrel.kernels.ops import Ops
from kestrel.models.contract import DecoderModel
from kestrel.runtime.adapter_slots import AdapterSlots, SlotAdapt
from kestrel.runtime.attention import ChunkAttention, ChunkNumbers, PagedKVCache, StoredChunks, long_and_short
from kestrel.runtime.contract import PrefillChunk
from kestrel.runtime.device import upload_tensor
from kestrel.runtime.graph_pool import GraphPool, Replayable
from kestrel.runtime.rows import RowTable

FINE, COARSE = 64, 128
FINE_UP_TO = 1024
MAX_FORMS = 256
"""Captured; further ones are launched kernel by kernel, so that odd traffic does not fill the memory with graphs."""
PATIENCE = 3
"""Times that a form runs in a larger one before it is launched, and then captured, by itself."""
LONGEST_STEP = 256
"""Lengths of chunks are told apart by so many positions: they only decide how many programs are started."""


@dataclass(frozen=True, slots=True)
class PrefillForm:
    """What a graph is captured for."""

    num_positions: int
    num_long: int
    num_short: int
    longest: int
    wants_all: bool
    is_adapted: bool

    @property
    def num_wanted(self) -> int:
        """At most: a chunk has one position that a token follows."""
        return self.num_positions if self.wants_all else min(self.num_positions, self.num_long + self.num_short)

    def holds(self, other: PrefillForm) -> bool:
        """Whether a step of that form can run in this one."""
        return (
            (self.wants_all, self.is_adapted) == (other.wants_all, other.is_adapted)
            and self.num_positions >= other.num_positions
            and self.num_long >= other.num_long
            and self.num_short >= other.num_short
            and self.longest >= other.longest
        )

    @classmethod
    def of(
        cls,
        num_positions: int,
        long: Sequence[ChunkNumbers],
        short: Sequence[ChunkNumbers],
        *,
        wants_all: bool = False,
        is_adapted: bool = False,
    ) -> PrefillForm:
        step = FINE if num_positions <= FINE_UP_TO else COARSE
        longest = max((chunk.num_positions for chunk in long), default=0)
        return cls(
            -(-num_positions // step) * step,
            _next_power_of_2(len(long)),
            _next_power_of_2(len(short)),
            -(-longest // LONGEST_STEP) * LONGEST_STEP,
            wants_all,
            is_adapted,
        )


@dataclass(frozen=True, slots=True)
class CapturedPrefill:
    graph: Replayable
    integers: Tensor


class PrefillGraphs:
    def __init__(
        self,
        model: DecoderModel,
        kv: PagedKVCache,
        table: RowTable,
        ops: Ops,
        max_positions: int,
        pool: GraphPool,
        adapters: AdapterSlots | None = None,
    ) -> None:
        """Without `adapters`, steps with rows that use one do not fit."""
        self._adapters = adapters
        self._model, self._kv, self._table, self._ops, self._pool = model, kv, table, ops, pool
        self._max_positions = -(-max_positions // COARSE) * COARSE
        shape = (self._max_positions, model.shape.hidden_dim)
        self._x_TD = torch.zeros(shape, dtype=model.dtype, device=table.device)
        self._hidden_TD = torch.zeros_like(self._x_TD)
        self._captured: dict[PrefillForm, CapturedPrefill] = {}
        self._has_run: set[PrefillForm] = set()
        self._num_held: Counter[PrefillForm] = Counter()

    def prepare(self) -> None:
        """Captures what usual prompts need, after the most that fits a step: the rest finds room in what that takes.
        The same for adapted prompts where there are adapters, or a flood would meet every form for the first time."""
        for is_adapted in (False, True) if self._adapters is not None else (False,):
            for usual in dict.fromkeys(self._usual_forms()):
                form = replace(usual, is_adapted=is_adapted)
                if form.num_positions <= self._max_positions:
                    self._captured[form] = self._capture(form)

    def _usual_forms(self) -> tuple[PrefillForm, ...]:
        """A full step first, then a short prompt and, where the model reads pictures, one with a question."""

        def chunk(num_positions: int, sees_all: int = 0) -> ChunkNumbers:
            return ChunkNumbers(0, num_positions, start=0, sees_all=sees_all, row=self._table.spare_row)

        few, most = FINE // 4, self._max_positions
        short = PrefillForm.of(few, [], [chunk(few)])
        if self._model.vision is None:
            return PrefillForm.of(most, [chunk(most)], []), short
        many = self._model.shape.num_image_positions + 1
        question, picture, fitting = chunk(few), chunk(many, sees_all=1), most // (many + few)
        return (
            PrefillForm.of(most, [picture] * fitting, [question] * max(1, fitting)),
            short,
            PrefillForm.of(many + few, [picture], [question]),
        )

    def fits(self, num_positions: int, is_adapted: bool) -> bool:
        return num_positions <= self._max_positions and (self._adapters is not None or not is_adapted)

    def run(
        self,
        embedded: list[Tensor],
        chunks: Sequence[PrefillChunk],
        rows: Tensor,
        positions: Tensor,
        wanted: list[int] | None,
        is_adapted: bool,
    ) -> Tensor:
        """The residual stream of the wanted positions, or of all; the next run overwrites it."""
        long, short = long_and_short(chunks)
        form = PrefillForm.of(len(positions), long, short, wants_all=wanted is None, is_adapted=is_adapted)
        self._capture_if_worth_it(form)
        form = self._held_by(form)
        torch.cat(embedded, out=self._x_TD[: len(positions)])
        integers = self._integers(form, long, short, (rows, positions), wanted or [])
        captured = self._captured.get(form)
        if captured is None:
            self._forward(form, integers)
            self._has_run.add(form)
        else:
            captured.integers.copy_(integers)
            captured.graph.replay()
        self._pool.mark()
        return self._hidden_TD[: len(positions) if wanted is None else len(wanted)]

    def _capture_if_worth_it(self, form: PrefillForm) -> None:
        """What comes up once is not, and what has run is quickly recorded."""
        if form in self._has_run and form not in self._captured and len(self._captured) < MAX_FORMS:
            self._captured[form] = self._capture(form, has_run=True)

    def _held_by(self, form: PrefillForm) -> PrefillForm:
        """The smallest captured form that holds this one while the GPU waits, or the form itself. Other ranks' GPUs may
        not wait at the same time, and all must run the same form."""
        if not self._model.ranks.is_alone:
            return form
        if form in self._captured or not self._pool.is_idle or self._num_held[form] >= PATIENCE:
            return form
        holding = [captured for captured in self._captured if captured.holds(form)]
        if not holding:
            return form
        self._num_held[form] += 1
        return min(holding, key=lambda captured: captured.num_positions)

    def _integers(
        self,
        form: PrefillForm,
        long: Sequence[ChunkNumbers],
        short: Sequence[ChunkNumbers],
        places: tuple[Tensor, Tensor],
        wanted: list[int],
    ) -> Tensor:
        """Rows and positions, the numbers of the long and of the short chunks, wanted positions, each filled up."""
        rows, positions = places
        spare, missing = self._table.spare_row, form.num_positions - len(positions)
        filled = [rows, torch.full((missing,), spare), positions, torch.zeros(missing, dtype=torch.int64)]
        numbers: list[int] = []
        for chunks, capacity in ((long, form.num_long), (short, form.num_short)):
            empty = ChunkNumbers(first=0, num_positions=0, start=0, sees_all=0, row=spare)
            for column in zip(*chunks, *[empty] * (capacity - len(chunks)), strict=True):
                numbers += column
        if not form.wants_all:
            numbers += [*wanted, *[0] * (form.num_wanted - len(wanted))]
        return upload_tensor(torch.cat([*filled, torch.tensor(numbers)]), self._table.device)

    def _capture(self, form: PrefillForm, has_run: bool = False) -> CapturedPrefill:
        """Tried out on the spare row alone, without chunks."""
        nowhere = torch.empty(0, dtype=torch.int64)
        integers = self._integers(form, [], [], (nowhere, nowhere), [])
        graph, _ = self._pool.capture(lambda: self._forward(form, integers), has_run)
        return CapturedPrefill(graph, integers)

    def _forward(self, form: PrefillForm, integers: Tensor) -> None:
        n = form.num_positions
        counts = [n, n, 5 * form.num_long, 5 * form.num_short, 0 if form.wants_all else form.num_wanted]
        rows_T, positions_T, long, short, wanted = integers.split(counts)
        tables = [
            StoredChunks.of_numbers(numbers.view(5, -1), self._table, longest)
            for numbers, longest in ((long, form.longest), (short, FINE))
            if len(numbers)
        ]
        attention = ChunkAttention.of_positions(self._kv, self._ops, self._table, rows_T, positions_T, tables)
        adapt = None
        if form.is_adapted:
            assert self._adapters is not None
            adapt = SlotAdapt(self._adapters, self._table.tensors.adapter_slot[rows_T], self._ops)
        self._hidden_TD[: form.num_wanted] = self._model.forward(
            self._x_TD[:n], positions_T, attention, adapt, None if form.wants_all else wanted
        )


def _next_power_of_2(count: int) -> int:
    return 0 if count == 0 else 1 << (count - 1).bit_length()
