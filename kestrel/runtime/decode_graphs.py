"""`FixedDecode` as CUDA graphs: usual ones are captured at the start, others when they come up for the second time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kestrel.grammar import Carries
from kestrel.kernels.ops import Ops
from kestrel.models.contract import DecoderModel
from kestrel.runtime.adapter_slots import AdapterSlots
from kestrel.runtime.contract import DecodeRow
from kestrel.runtime.fixed_decode import DecodeParts, FixedDecode, first_rows
from kestrel.runtime.graph_pool import GraphPool, Replayable
from kestrel.runtime.kv_cache import PagedKVCache
from kestrel.runtime.rows import RowTable
from kestrel.runtime.sampler import Sampled


@dataclass(frozen=True, slots=True)
class CapturedStep:
    graph: Replayable
    inputs: tuple[Tensor, Tensor]
    sampled: Sampled

    def run(self, *inputs: Tensor) -> Sampled:
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given)
        self.graph.replay()
        return self.sampled


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
            if key not in self._steps_run:
                sampled = super().run(decode, parts)
                self._steps_run.add(key)
                return sampled
            self._steps[key] = self.capture(*key, has_run=True)
        return first_rows(self._steps[key].run(*self.inputs(decode)), len(decode))

    def sample(self, hidden_BD: Tensor, rows: list[int], parts: DecodeParts) -> Sampled:
        self._drop_outdated()
        key = (self.size_for(len(rows)), replace(parts, is_adapted=False))
        if key not in self._samplings:
            if key not in self._samplings_run:
                sampled = super().sample(hidden_BD, rows, parts)
                self._samplings_run.add(key)
                return sampled
            self._samplings[key] = self._capture_sampling(*key, has_run=True)
        return first_rows(self._samplings[key].run(*self.sample_inputs(hidden_BD, rows)), len(rows))

    def capture(self, size: int, parts: DecodeParts, has_run: bool = False) -> CapturedStep:
        """Every entry is the spare row while it is tried out and recorded, so nobody's state is touched."""
        rows_B, positions_B = self._spare_rows(size), self._spare_rows(size).zero_()
        graph, sampled = self._pool.capture(lambda: self.step(rows_B, positions_B, parts), has_run)
        return CapturedStep(graph, (rows_B, positions_B), sampled)

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
            for known in (self._steps, self._samplings, self._steps_run, self._samplings_run):
                known.clear()
            self._version = self._table.grammars.version
