"""Ranks as processes of one machine: NCCL between GPUs, gloo between CPUs.

The group is an object of its own and not torch's default one, so that a program may have several engines, or use
torch.distributed for itself. Every rank must call the same methods in the same order. A rank that waits for work is in
no call, so that no time limit runs while an engine is idle.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kestrel.parallel.ranks import Ranks

dist: Any = torch.distributed
"""Its groups have fewer types than methods."""
TIMEOUT = timedelta(minutes=10)
"""Of one call. The death of a rank is seen much sooner: by its connections, and by whoever started it."""
MIN_SUM_BYTES = 4
"""Numbers of fewer bytes are added up in fp32 on a CPU."""


class RankGroup(Ranks):
    """To meet and then connect, once all ranks are there, before anything is added up."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._group: Any = None

    def meet(self, place: Path) -> None:
        """`place`: a file that all ranks name and nobody else uses. Its folder has to be there: torch would wait for
        it, and hold Python's lock."""
        self._store = dist.FileStore(str(place), self.size)

    def connect(self, device: torch.device) -> None:
        """Waits for the others."""
        self._device = device
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            self._group = dist.ProcessGroupNCCL(self._store, self.rank, self.size, options)
        else:
            self._group = _gloo(self._store, self.rank, self.size)

    def end(self) -> None:
        """Also while a thread waits in a call, which fails then. The group's threads end here: a process that is forked
        from this one could not end them."""
        group, self._group = self._group, None
        if group is not None:
            with suppress(Exception):  # a group that has failed may refuse
                group.abort()

    def sum(self, part: Tensor) -> Tensor:
        """In place where the numbers are wide enough to be added up."""
        is_narrow = part.dtype.itemsize < MIN_SUM_BYTES and not part.is_cuda
        total = part.float() if is_narrow else part.contiguous()
        self._connected.allreduce([total]).wait()
        return total.to(part.dtype)

    def sums(self, *deltas: Tensor) -> tuple[Tensor, ...]:
        first, *others = deltas
        for delta in others:
            first = first + delta
        return (self.sum(first),)

    def residual(self, x_TD: Tensor) -> Tensor | None:
        return None

    def ended(self, x_TD: Tensor, total_TD: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return x_TD, (self.sum(total_TD),)

    def columns(self, x_TD: Tensor) -> Tensor:
        first, end = self.share(x_TD.shape[1])
        return x_TD[:, first:end].contiguous()

    def gather(self, part_TF: Tensor) -> Tensor:
        num_rows, num_columns = part_TF.shape
        parts = part_TF.new_empty(self.size * num_rows, num_columns)
        self._connected._allgather_base(parts, part_TF.contiguous()).wait()
        return parts.view(self.size, num_rows, num_columns).transpose(0, 1).flatten(1)

    def least(self, number: int) -> int:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        least = torch.tensor([number], device=self._device)
        self._connected.allreduce([least], options).wait()
        return int(least)

    @property
    def _connected(self) -> Any:
        if self._group is None:
            raise RuntimeError("the ranks have parted")
        return self._group


def _gloo(store: Any, rank: int, size: int) -> Any:
    """Between processes of this machine, so that nobody else can reach it."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = TIMEOUT
    return dist.ProcessGroupGloo(store, rank, size, options)
