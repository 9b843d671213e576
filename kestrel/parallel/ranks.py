"""What layers know of the other processes that hold parts of their model.

A matrix is split by its outputs (column split: each rank computes some of them from whole rows) or by its inputs (row
split: each rank multiplies the columns that it has, and the results are added up). `Ranks` is a process that has the
whole model: nothing is added up, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from kestrel.errors import ConfigError

Range: TypeAlias = tuple[int, int]
"""From the first to before the second."""


@dataclass(frozen=True, slots=True)
class Part:
    """Of a tensor along one dimension, counted from the last: these ranges, in ascending order."""

    dim: int
    ranges: tuple[Range, ...]
    whole: int
    """The size of the whole tensor there."""
    is_elsewhere: bool = False
    """Another rank adds the tensor: zeros here."""

    @property
    def size(self) -> int:
        return sum(end - start for start, end in self.ranges)

    def cut(self, whole: Tensor) -> Tensor:
        """A view where it can be. Of a tensor without numbers a new one: looking into it pulls in torch's compiler."""
        if whole.is_meta:
            return torch.empty(self.own_shape(tuple(whole.shape)), dtype=whole.dtype, device="meta")
        if self.is_elsewhere:
            return torch.zeros_like(whole)
        pieces = [whole.narrow(self.dim, start, end - start) for start, end in self.ranges]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=self.dim)

    def within(self, first: int, size: int) -> Part:
        """The part of a window of the whole, counted from where the window begins."""
        cut = ((max(start - first, 0), min(end - first, size)) for start, end in self.ranges)
        return Part(self.dim, tuple(one for one in cut if one[0] < one[1]) or ((0, 0),), size)

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return self._with(shape, self.whole)

    def own_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return self._with(shape, self.size)

    def _with(self, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
        at = len(shape) + self.dim
        return (*shape[:at], size, *shape[at + 1 :])


class Ranks:
    """A process that has the whole model."""

    rank = 0
    size = 1

    def __deepcopy__(self, _: object) -> Ranks:
        """A copy of a model has the same neighbours."""
        return self

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    def share(self, count: int) -> Range:
        """Which of so many equal things this rank has. Where there are fewer than ranks, several have the same one."""
        assert count % self.size == 0 or self.size % count == 0, f"{count} over {self.size} ranks"
        first = self.rank * count // self.size
        return first, first + max(1, count // self.size)

    def sum(self, part: Tensor) -> Tensor:
        """The sum of what all ranks give."""
        return part

    def sums(self, *deltas: Tensor) -> tuple[Tensor, ...]:
        """What all ranks together add to the residual stream, in one or more tensors."""
        return deltas

    def residual(self, x_TD: Tensor) -> Tensor | None:
        """What a product that ends a block is added to at once."""
        return x_TD

    def ended(self, x_TD: Tensor, total_TD: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """(residual stream, what is still to be added to it) behind such a product."""
        return total_TD, ()

    def columns(self, x_TD: Tensor) -> Tensor:
        """This rank's share of the columns of what all have."""
        return x_TD

    def gather(self, part_TF: Tensor) -> Tensor:
        """The columns of all ranks side by side."""
        return part_TF

    def least(self, number: int) -> int:
        """The smallest that a rank gives."""
        return number


ALONE = Ranks()


def refuse_uneven(size: int, counts: Mapping[str, int], kv_heads: Mapping[str, int]) -> None:
    """Names the field of a model that so many ranks cannot share evenly."""
    for name, count in {**counts, **kv_heads}.items():
        if count % size and not (name in kv_heads and size % count == 0):
            raise ConfigError(
                "tensor_parallel_size",
                f"{size} does not divide {name} of the model, which is {count}; use a number that does",
            )
