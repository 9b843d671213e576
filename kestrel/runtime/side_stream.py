"""Work that runs beside the rest of a step: pictures are encoded while rows decode.

Decoding waits for memory and encoding for arithmetic, so a GPU does both at once in little more than the time of the
longer one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SideStream:
    """A second stream of a GPU; on a CPU everything runs in order, and this does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def running(self) -> Iterator[None]:
        """What is launched inside does not wait for the main stream."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """What is launched inside comes after what the main stream has been given, and before what it gets later."""
        if self._stream is None:
            yield
            return
        main = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            yield
        main.wait_stream(self._stream)

    def join(self, results: Iterable[Tensor]) -> None:
        """From here on the main stream may use the results."""
        waiting = list(results)
        if self._stream is None or not waiting:
            return
        main = torch.cuda.current_stream(self._device)
        main.wait_stream(self._stream)
        for result in waiting:
            result.record_stream(main)
