"""Work ahead: a thread makes the next items while the current one is in use, on a CUDA stream of its own."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")


@dataclass(frozen=True)
class _Ready(Generic[Item]):
    item: Item
    done: torch.cuda.Event | None


@dataclass(frozen=True)
class _Failure:
    error: BaseException


class _End:
    pass


class Prefetcher(Generic[Item]):
    """Iterates over what `make` yields, up to `ahead` items ahead. `tensors_of` names an item's tensors, whose memory
    must not be used anew before the consumer is done with them."""

    def __init__(
        self,
        make: Iterator[Item],
        tensors_of: Callable[[Item], list[Tensor]],
        device: torch.device,
        ahead: int = 2,
    ) -> None:
        self._tensors_of = tensors_of
        self._device = device
        self._ready: queue.Queue[_Ready[Item] | _Failure | _End] = queue.Queue(ahead)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(make,), name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        ready = self._ready.get()
        if isinstance(ready, _End):
            raise StopIteration
        if isinstance(ready, _Failure):
            raise ready.error
        if ready.done is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(ready.done)
            for tensor in self._tensors_of(ready.item):
                tensor.record_stream(stream)
        return ready.item

    def close(self) -> None:
        """Stop the thread; it ends after the item it is at."""
        self._stop.set()
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._ready.get(timeout=0.05)
        self._thread.join()

    def __enter__(self) -> Prefetcher[Item]:
        return self

    def __exit__(
        self, error: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _work(self, make: Iterator[Item]) -> None:
        try:
            if self._device.type == "cuda":
                with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream(self._device)):
                    self._fill(make)
            else:
                self._fill(make)
            self._ready.put(_End())
        except BaseException as error:  # handed to the consumer, whatever it is
            self._ready.put(_Failure(error))

    def _fill(self, make: Iterator[Item]) -> None:
        for item in make:
            if self._stop.is_set():
                return
            done = None
            if self._device.type == "cuda":
                done = torch.cuda.Event()
                done.record()
            self._ready.put(_Ready(item, done))
            if self._stop.is_set():
                return
