"""The trainable part: a pair of factors beside each chosen matrix of the text model, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kestrel.adapters import Adapter, AdapterShape, AdapterTarget, LowRankPair
from kestrel.adapters.adapter import Matrix
from kestrel.adapters.formats import OWN_FORMAT
from kestrel.errors import ConfigError


class Factors:
    """Factors in fp32. `a` starts small and by chance, `b` at zero: at first the adapter changes nothing."""

    def __init__(
        self,
        shape: AdapterShape,
        matrices: Sequence[Matrix],
        rank: int,
        alpha: float,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        _check_rank(shape, matrices, rank)
        self.rank, self.alpha = rank, alpha
        chance = torch.Generator().manual_seed(seed)
        self._pairs: dict[AdapterTarget, LowRankPair] = {}
        for layer in range(shape.num_layers):
            for matrix in matrices:
                target = AdapterTarget(layer, matrix)
                a_shape, b_shape = (shape.tensor_shape(target, side, rank) for side in ("a", "b"))
                a = torch.randn(a_shape, generator=chance) * a_shape[-1] ** -0.5
                self._pairs[target] = LowRankPair(
                    a.to(device).requires_grad_(True), torch.zeros(b_shape, device=device).requires_grad_(True)
                )

    def parameters(self) -> list[Tensor]:
        return [factor for pair in self._pairs.values() for factor in (pair.a, pair.b)]

    @property
    def num_parameters(self) -> int:
        return sum(factor.numel() for factor in self.parameters())

    def adapter(self, base_model: str | None = None, metadata: Mapping[str, str] | None = None) -> Adapter:
        """On the very factors: what is learnt later shows in it."""
        return Adapter(
            OWN_FORMAT, self.rank, self._pairs, self.alpha, base_model=base_model, metadata=dict(metadata or {})
        )

    def values(self) -> list[Tensor]:
        """A copy on the CPU."""
        return [factor.detach().to("cpu", copy=True) for factor in self.parameters()]

    @torch.no_grad()
    def assign(self, values: Sequence[Tensor]) -> None:
        for factor, value in zip(self.parameters(), values, strict=True):
            factor.copy_(value)


def _check_rank(shape: AdapterShape, matrices: Sequence[Matrix], rank: int) -> None:
    experts = shape.moe
    if experts is None or not {"fc1", "fc2"} & set(matrices) or shape.num_dense_layers == shape.num_layers:
        return
    if rank % experts.experts_per_token:
        each = experts.experts_per_token
        raise ConfigError("rank", f"must be a multiple of {each}: a token's {each} experts share it (got {rank})")
