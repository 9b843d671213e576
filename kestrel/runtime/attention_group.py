"""What attention of a step is made of: groups of positions that are attended to in one call each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

SlotsOf: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(rows, positions) to the slots where their keys and values lie."""


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What one layer hands over: the flat new positions, and the cache that already holds them."""

    q_THD: Tensor
    k_THD: Tensor
    v_THD: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k_scale: float
    v_scale: float


class AttentionGroup(Protocol):
    def attend(self, layer: LayerInputs, out_THD: Tensor) -> None:
        """Writes the outputs of the group's positions."""
        ...
