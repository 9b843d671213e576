"""One adapter for every position: the plain way to apply a fine-tune, which the batched one is held to."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from kestrel.adapters import Adapter, AdapterTarget, LowRankPair
from kestrel.adapters.adapter import Matrix
from kestrel.kernels.low_rank import low_rank
from kestrel.layers.adapt import Adapt


def target_of(adapter: Adapter, layer: int, matrix: str) -> AdapterTarget | None:
    """The adapter's target behind a place of the model; None where it adds nothing there."""
    own = cast(Matrix, "proj" if matrix == "proj_of_norm" else matrix)
    reads_norm = own == "proj" and adapter.proj_input == "block_norm"
    target = AdapterTarget(layer, own)
    return target if reads_norm == (matrix == "proj_of_norm") and target in adapter.targets else None


class SingleAdapter(Adapt):
    """`Adapt` with the same adapter for all positions. Gradients flow through it."""

    def __init__(
        self, adapter: Adapter, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self._adapter = adapter
        self._pairs = {
            target: LowRankPair(pair.a.to(device, dtype), pair.b.to(device, dtype))
            for target, pair in adapter.targets.items()
        }

    def linear(self, layer: int, matrix: str, x_TD: Tensor, y_TF: Tensor) -> Tensor:
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
