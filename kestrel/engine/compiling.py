"""Threads of their own for laying out requests with an answer format.

A few compile, each behind a trial that bounds its time. One more serves the formats that are compiled already, so that
these never wait behind one that is not.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kestrel.errors import QueueFull
from kestrel.skills.base import ConstraintSource

NUM_COMPILING = 2
"""A format that takes all of its time holds up no other as long as it is alone."""
MAX_WAITING = 64
"""Requests with formats that are not compiled yet. What they wait is not counted against what their own may take."""
STACK_BYTES = 64 * 2**20
"""The compiler calls itself once for every level of a schema; a thread's usual stack holds some hundred of them."""

T = TypeVar("T")


class FormatThreads:
    """Where requests with an answer format are laid out."""

    def __init__(self, constraints: ConstraintSource | None) -> None:
        self._constraints = constraints
        self._compiling = DeepThreads("compile", NUM_COMPILING)
        self._starting = DeepThreads("formats", 1)
        self._num_waiting = 0

    async def prepare(self) -> None:
        """What every format needs, so that the first one finds it ready."""
        if self._constraints is not None:
            await self._starting.run(self._constraints.prepare)

    async def run(self, is_kept: bool, function: Callable[..., T], *arguments: Any) -> T:
        """`is_kept`: the format is compiled already. Should it be given up meanwhile, this compiles it as well."""
        if is_kept:
            return await self._starting.run(function, *arguments)
        if self._num_waiting >= MAX_WAITING:
            raise QueueFull(f"{self._num_waiting} answer formats are waiting to be compiled; retry later")
        self._num_waiting += 1
        try:
            return await self._compiling.run(function, *arguments)
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        """Nothing that was begun holds up the end of the process: trials are killed."""
        self._compiling.close()
        self._starting.close()
        if self._constraints is not None:
            self._constraints.close()


class DeepThreads:
    """Threads with deep stacks, started on first use."""

    def __init__(self, name: str, number: int) -> None:
        self._name = name
        self._number = number
        self._pool: ThreadPoolExecutor | None = None

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """A caller that is cancelled leaves at once; what was begun ends by itself."""
        if self._pool is None:
            self._pool = self._started()
        return await asyncio.wrap_future(self._pool.submit(function, *arguments))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _started(self) -> ThreadPoolExecutor:
        """Threads take the stack size that is set while they start, so all of them start at once."""
        pool = ThreadPoolExecutor(self._number, thread_name_prefix=f"kestrel-{self._name}")
        all_started = threading.Barrier(self._number)
        before = threading.stack_size(STACK_BYTES)
        try:
            for _ in range(self._number):
                pool.submit(all_started.wait)
        finally:
            threading.stack_size(before)
        return pool
