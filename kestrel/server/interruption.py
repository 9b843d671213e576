"""Ending what a task is waiting for from a callback, without a second task to wait in."""

from __future__ import annotations

import asyncio
import sys
from types import TracebackType


class Interruption:
    """`with Interruption(error) as it:` raises `error` out of the block once `it.interrupt()` was called.

    The block sees a cancellation, as in `asyncio.wait_for`, and may clean up. If somebody else cancelled the task too,
    such as a block around this one, it stays a cancellation.
    """

    def __init__(self, error: BaseException | None = None) -> None:
        self._error = error
        self._task: asyncio.Task[object] | None = None
        self._has_fired = False
        self._num_cancels_before = 0

    def __enter__(self) -> Interruption:
        self._task = asyncio.current_task()
        if self._task is not None and sys.version_info >= (3, 11):
            self._num_cancels_before = self._task.cancelling()
        return self

    def interrupt(self, error: BaseException | None = None) -> None:
        """`error` may be given here instead. After the block, and the second time, it does nothing."""
        if self._task is not None and not self._has_fired:
            self._has_fired = True
            self._error = error or self._error
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if not self._has_fired or task is None:
            return
        if sys.version_info >= (3, 11) and task.uncancel() > self._num_cancels_before:
            return
        if isinstance(error, asyncio.CancelledError) and self._error is not None:
            raise self._error from None
