"""One adapter for every position: the plain way to apply a fine-tune, which the batched one is held to."""

from __future__ import annotations

import torch
from torch import Tensor

from kestrel.adapters import Adapter, AdapterShape, AdapterTarget, LowRankPair
from kestrel.kernels.low_rank import low_rank
from kestrel.layers.adapt import Adapt


class SingleAdapter(Adapt):
    """`Adapt` with the same adapter for all positions. Gradients flow through it."""

    def __init__(
        self,
        adapter: Adapter,
        shape: AdapterShape,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._adapter = adapter
        self._shape = shape
        self._pairs = {
            target: LowRankPair(pair.a.to(device, dtype), pair.b.to(device, dtype))
            for target, pair in adapter.targets.items()
        }

    def linear(self, layer: int, matrix: str, x_TD: Tensor, y_TF: Tensor) -> Tensor:
        place = "proj" if matrix == "proj_of_norm" else matrix
        reads_norm = place == "proj" and self._adapter.proj_input == "block_norm"
        names = self._shape.places(layer).get(place, ())
        if not names or reads_norm != (matrix == "proj_of_norm"):
            return y_TF
        each = zip(names, y_TF.split([self._shape.layers[layer][name].rows for name in names], dim=1), strict=True)
        parts = [self._of_part(AdapterTarget(layer, name), x_TD, own_TF) for name, own_TF in each]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _of_part(self, target: AdapterTarget, x_TD: Tensor, y_TF: Tensor) -> Tensor:
        pair = self._pairs.get(target)
        return y_TF if pair is None else y_TF + self._adapter.scale * low_rank(x_TD, pair.a, pair.b)

    def expert(self, layer: int, matrix: str, expert: int, positions_N: Tensor, x_ND: Tensor, y_NF: Tensor) -> Tensor:
        pair = self._pairs.get(AdapterTarget(layer, self._shape.places(layer)[matrix][0]))
        return y_NF if pair is None else y_NF + self._adapter.scale * low_rank(x_ND, pair.a[expert], pair.b[expert])


def merged_delta(adapter: Adapter, target: AdapterTarget) -> Tensor:
    """What to add to the base matrix (or to each expert's) to have the adapter built in."""
    pair = adapter.targets[target]
    return adapter.scale * (pair.b @ pair.a)
