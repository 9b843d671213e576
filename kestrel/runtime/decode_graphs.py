"""`FixedDecode` steps as CUDA graphs: captured when first needed, replayed from then on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kestrel.kernels.ops import Ops
from kestrel.models.contract import DecoderModel
from kestrel.runtime.contract import DecodeRow
from kestrel.runtime.fixed_decode import DecodeParts, FixedDecode, first_rows
from kestrel.runtime.kv_cache import PagedKVCache
from kestrel.runtime.rows import RowTable
from kestrel.runtime.sampler import Sampled

WARM_UP_RUNS = 2
"""Before a capture, so that libraries allocate and choose their kernels outside of it."""


@dataclass(frozen=True, slots=True)
class CapturedStep:
    graph: torch.cuda.CUDAGraph
    rows_B: Tensor
    positions_B: Tensor
    sampled: Sampled


class DecodeGraphs(FixedDecode):
    """A graph per batch size and set of parts. The grammar tables may move: then all are captured anew."""

    def __init__(
        self, model: DecoderModel, kv: PagedKVCache, table: RowTable, ops: Ops, sizes: Sequence[int]
    ) -> None:
        super().__init__(model, kv, table, ops, sizes)
        self._steps: dict[tuple[int, DecodeParts], CapturedStep] = {}
        self._version = table.grammars.version
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, decode: list[DecodeRow], parts: DecodeParts) -> Sampled:
        """What it returns is overwritten by the next replay: copy it on the same stream."""
        if self._version != self._table.grammars.version:
            self._steps.clear()
            self._version = self._table.grammars.version
        key = (self.size_for(len(decode)), parts)
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = self.capture(*key)
        rows_B, positions_B = self.inputs(decode)
        step.rows_B.copy_(rows_B)
        step.positions_B.copy_(positions_B)
        step.graph.replay()
        return first_rows(step.sampled, len(decode))

    def capture(self, size: int, parts: DecodeParts) -> CapturedStep:
        """Every entry is the spare row while it is tried out and recorded, so nobody's state is touched."""
        device = self._table.device
        rows_B = torch.full((size,), self._table.spare_row, dtype=torch.int64, device=device)
        positions_B = torch.zeros(size, dtype=torch.int64, device=device)
        aside = torch.cuda.Stream(device)
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP_RUNS):
                self.step(rows_B, positions_B, parts)
        torch.cuda.current_stream(device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            sampled = self.step(rows_B, positions_B, parts)
        return CapturedStep(graph, rows_B, positions_B, sampled)
