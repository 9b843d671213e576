"""Device work recorded once and replayed: CUDA graphs that share one pool of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

Result = TypeVar("Result")


class Replayable(Protocol):
    def replay(self) -> None: ...


class GraphPool:
    """Graphs of one pool must be replayed on one stream: each uses the others' scratch memory."""

    def __init__(self, device: torch.device, is_urgent: bool = False) -> None:
        """The kernels of an urgent pool go before those of others that run at the same time."""
        self._device = device
        self._handle = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device, priority=-1 if is_urgent else 0)
        self._last = torch.cuda.Event()
        # A pool lives as long as some graph of it: this one, which does nothing, is never dropped.
        self._keeper, _ = self.capture(lambda: torch.zeros(1, device=device))

    def capture(self, work: Callable[[], Result], has_run: bool = False) -> tuple[Replayable, Result]:
        """The recorded work, and what it returned: tensors that every replay overwrites. Work that `has_run` before is
        only recorded, while the GPU goes on with what it has.
        """
        if not has_run:
            self._try_out(work)
        try:
            return self._record(work)
        except torch.OutOfMemoryError:
            pass  # what other work left cached cannot be used inside a capture: give it back, and try again below
        torch.cuda.empty_cache()
        return self._record(work)

    def mark(self) -> None:
        """Call it behind the work of the pool's graphs, on their stream."""
        self._last.record()

    @property
    def is_idle(self) -> bool:
        """Whether the GPU is done with all that was marked."""
        return self._last.query()

    def _try_out(self, work: Callable[[], object]) -> None:
        """So that libraries allocate and choose their kernels before a capture."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.synchronize(self._device)

    def _record(self, work: Callable[[], Result]) -> tuple[Replayable, Result]:
        graph = torch.cuda.CUDAGraph()
        # Not by `torch.cuda.graph`, which also gives cached memory back: what runs next would have to ask for it again.
        with torch.cuda.stream(self._stream):
            # What other threads ask of the driver meanwhile must not spoil the capture.
            graph.capture_begin(self._handle, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                graph.capture_end()
        return graph, result
