"""Ranks as threads of one process: what they add up goes through a list instead of a network."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from kestrel.parallel.group import RankGroup

Result = TypeVar("Result")


class _Done:
    def wait(self) -> None:
        pass


class _Member:
    """The calls that `RankGroup` makes of torch's groups."""

    def __init__(self, rank: int, given: list[Tensor | None], barrier: threading.Barrier) -> None:
        self._rank, self._given, self._barrier = rank, given, barrier

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> _Done:
        stacked = torch.stack(self._exchanged(tensors[0]))
        wants_least = options is not None and options.reduceOp == dist.ReduceOp.MIN
        tensors[0].copy_(stacked.amin(0) if wants_least else stacked.sum(0))
        return _Done()

    def _allgather_base(self, whole: Tensor, own: Tensor) -> _Done:
        whole.copy_(torch.cat(self._exchanged(own)))
        return _Done()

    def _exchanged(self, own: Tensor) -> list[Tensor]:
        self._given[self._rank] = own.clone()
        self._barrier.wait(300)
        given = [tensor for tensor in self._given if tensor is not None]
        self._barrier.wait(300)
        return given


def in_ranks(size: int, work: Callable[[RankGroup], Result]) -> list[Result]:
    """What the work of each rank returns."""
    given: list[Tensor | None] = [None] * size
    barrier = threading.Barrier(size)

    def run(rank: int) -> Result:
        group = RankGroup(rank, size)
        group._group, group._device = _Member(rank, given, barrier), torch.device("cpu")
        try:
            with torch.inference_mode():
                return work(group)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))
