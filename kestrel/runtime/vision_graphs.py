"""The encoding of crops as CUDA graphs, one per number of crops: filling up to a coarser size would cost more.

Small numbers and the largest are captured at the start, others when they come up for the second time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kestrel.models.contract import DecoderModel
from kestrel.runtime.graph_pool import GraphPool, Replayable


class VisionGraphs:
    def __init__(self, model: DecoderModel, max_crops: int, pool: GraphPool) -> None:
        self._model = model
        self._pool = pool
        self._max_crops = max_crops
        self._patches_NPC, self._features_NPD = model.new_crop_buffers(self._max_crops)
        self._graphs: dict[int, Replayable] = {}
        self._has_run: set[int] = set()

    def prepare(self, most: int) -> None:
        """Captures everything up to so many crops, after the most that are encoded together: the rest finds room in
        what those take."""
        self._graphs[self._max_crops] = self._capture(self._max_crops)
        for num_crops in range(1, min(most, self._max_crops - 1) + 1):
            self._graphs[num_crops] = self._capture(num_crops)

    def encode_crops(self, patches: Sequence[Tensor]) -> Tensor:
        """Features of all crops, one after another; the next call overwrites them."""
        num_crops = sum(map(len, patches))
        if num_crops > self._max_crops:
            return self._model.encode_crops(patches)
        if num_crops not in self._graphs and num_crops in self._has_run:
            self._graphs[num_crops] = self._capture(num_crops, has_run=True)
        torch.cat(list(patches), out=self._patches_NPC[:num_crops])
        graph = self._graphs.get(num_crops)
        if graph is None:
            self._encode(num_crops)
            self._has_run.add(num_crops)
        else:
            graph.replay()
        return self._features_NPD[:num_crops]

    def _capture(self, num_crops: int, has_run: bool = False) -> Replayable:
        return self._pool.capture(lambda: self._encode(num_crops), has_run)[0]

    def _encode(self, num_crops: int) -> None:
        self._features_NPD[:num_crops] = self._model.encode_crops([self._patches_NPC[:num_crops]])
