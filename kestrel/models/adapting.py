"""One adapter for every position: the plain way to apply a fine-tune, which the batched one is held to."""

from __future__ import annotations

import torch
from torch import Tensor

from kestrel.adapters import Adapter, AdapterShape, AdapterTarget, LowRankPair
from kestrel.kernels.low_rank import low_rank
from kestrel.layers.adapt import Adapt


def target_of(adapter: Adapter, layer: int, matrix: str) -> AdapterTarget | None:
    """The adapter's target behind a matrix of the model; None where it adds nothing there."""
    own = "proj" if matrix == "proj_of_norm" else matrix
    reads_norm = own == "proj" and adapter.proj_input == "block_norm"
    target = AdapterTarget(layer, own)
    return target if reads_norm == (matrix == "proj_of_norm") and target in adapter.targets else None


class SingleAdapter(Adapt):
    """`Adapt` with the same adapter for all positions. Gradients flow through it."""

    def __init__(
        self,
        adapter: Adapter,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        shape: AdapterShape | None = None,
    ) -> None:
        """`shape`: needed where adapters name parts of the model's matrices."""
        self._adapter = adapter
        self._shape = shape
        self._pairs = {
            target: LowRankPair(pair.a.to(device, dtype), pair.b.to(device, dtype))
            for target, pair in adapter.targets.items()
        }

    def has(self, matrix: str) -> bool:
        return self._shape is None or matrix in self._shape.places

    def linear(self, layer: int, matrix: str, x_TD: Tensor, y_TF: Tensor) -> Tensor:
        parts = () if self._shape is None else self._shape.places.get(matrix, ())
        if self._shape is None or len(parts) < 2:
            return self._whole(layer, parts[0] if parts else matrix, x_TD, y_TF)
        sizes = [self._shape.matrices[part].rows for part in parts]
        each = zip(parts, y_TF.split(sizes, dim=1), strict=True)
        return torch.cat([self._whole(layer, part, x_TD, own_TF) for part, own_TF in each], dim=1)

    def _whole(self, layer: int, matrix: str, x_TD: Tensor, y_TF: Tensor) -> Tensor:
        target = target_of(self._adapter, layer, matrix)
        if target is None:
            return y_TF
        pair = self._pairs[target]
        return y_TF + self._adapter.scale * low_rank(x_TD, pair.a, pair.b)

    def expert(self, layer: int, matrix: str, expert: int, positions_N: Tensor, x_ND: Tensor, y_NF: Tensor) -> Tensor:
        target = target_of(self._adapter, layer, matrix)
        if target is None:
            return y_NF
        pair = self._pairs[target]
        return y_NF + self._adapter.scale * low_rank(x_ND, pair.a[expert], pair.b[expert])


def merged_delta(adapter: Adapter, target: AdapterTarget) -> Tensor:
    """What to add to the base matrix (or to each expert's) to have the adapter built in."""
    pair = adapter.targets[target]
    return adapter.scale * (pair.b @ pair.a)
