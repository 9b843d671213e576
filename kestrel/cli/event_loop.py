"""Running a verb's coroutine so that Ctrl-C closes what it opened."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from types import FrameType
from typing import Any, TypeVar

from kestrel.cli.exit_codes import INTERRUPTED

ResultT = TypeVar("ResultT")


class Interrupted(Exception):
    """Ctrl-C ended the work, and everything it had opened is closed."""


class _Interrupts:
    """SIGINT handler: the first one cancels the work, a second one leaves at once."""

    def __init__(self) -> None:
        self.seen = False
        self._task: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, signal_number: int, frame: FrameType | None) -> None:
        if self.seen:
            os._exit(INTERRUPTED)
        self.seen = True
        if self._loop is not None and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)

    async def guard(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        if self.seen:
            work.close()
            raise asyncio.CancelledError
        return await work


def run_to_end(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The result of `work`. Raises Interrupted after Ctrl-C."""
    interrupts = _Interrupts()
    before = signal.signal(signal.SIGINT, interrupts)
    try:
        return asyncio.run(interrupts.guard(work))
    except asyncio.CancelledError:
        raise Interrupted from None
    finally:
        signal.signal(signal.SIGINT, before)
