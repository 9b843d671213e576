"""A case with one tuning after another: its times, whether its result is right, and the size a table knows it by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from triton.errors import TritonError

from kestrel.bench.kernels.case import Case, Maker, distance
from kestrel.bench.kernels.command import is_close
from kestrel.bench.kernels.timing import num_copies, seconds_per_call
from kestrel.kernels.triton.tuning_table import TunedSize, TuningTable, rows_range


class CannotRun(Exception):
    """What keeps a case from running on this GPU at all."""


class CaseTimer:
    """On the GPU of this machine."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype

    def seconds(self, case: Case, tunings: Iterable[Any | None]) -> dict[Any | None, float]:
        """None stands for the kernel's rules. Tunings that this GPU has no room for are left out."""
        makers = [Maker(self._device, self._dtype, seed) for seed in range(num_copies(case.bytes_moved))]
        found: dict[Any | None, float] = {}
        with _on_this_gpu():
            inputs = [case.make(maker) for maker in makers]
            for tuning in tunings:
                calls = [partial(case.triton, *arguments, tuning=tuning) for arguments in inputs]
                try:
                    found[tuning] = seconds_per_call(calls, captured=True)
                except TritonError:
                    if tuning is None:
                        raise
        return found

    def is_right(self, case: Case, tuning: Any) -> bool:
        """Whether the result is that of the plain version, as closely as any kernel's has to be."""
        with _on_this_gpu():
            got = case.triton(*case.make(Maker(self._device, self._dtype)), tuning=tuning)
            expected = case.plain(*case.make(Maker(self._device, self._dtype)))
            return is_close(case, distance(got, expected), self._dtype)

    def size(self, case: Case, op: str) -> TunedSize:
        """What the kernel asks a table for when it runs."""
        asked = _AskedTable()
        with _on_this_gpu():
            case.triton(*case.make(Maker(self._device, self._dtype)), table=asked)
        (size,) = {size for size in asked.sizes if size.op == op}
        return size


@contextmanager
def _on_this_gpu() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise CannotRun("it does not fit in the memory of this GPU") from error
    except TritonError as error:
        raise CannotRun(f"this GPU cannot run it ({type(error).__name__})") from error


class _AskedTable(TuningTable):
    """Empty, and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__({})
        self.sizes: list[TunedSize] = []

    def find(self, op: str, num_rows: int, dims: tuple[int, ...], *dtypes: torch.dtype) -> Any | None:
        self.sizes.append(TunedSize(op, rows_range(num_rows), dims, dtypes))
        return None
