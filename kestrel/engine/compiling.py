"""Threads of their own for laying out requests with an answer format, with a limit on their time.

One compiles, and may be busy for seconds. Another serves the formats that are compiled already, so that these never
wait behind one that is not.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kestrel.errors import QueueFull, RequestError

COMPILE_LIMIT_S = 5.0
STACK_BYTES = 64 * 2**20
"""The compiler calls itself once for every level of a schema; a thread's usual stack holds some hundred of them."""

T = TypeVar("T")


class FormatThreads:
    """Where requests with an answer format are laid out."""

    def __init__(self) -> None:
        self._compiling = CompilePool()
        self._starting = CompilePool()

    async def run(self, is_kept: bool, function: Callable[..., T], *arguments: Any) -> T:
        """`is_kept`: the format is compiled already. Should it be given up meanwhile, this compiles it as well."""
        pool = self._starting if is_kept else self._compiling
        return await pool.run(function, *arguments)

    def close(self) -> None:
        self._compiling.close()
        self._starting.close()


class CompilePool:
    """One thread, started on first use. Who waits longer than the limit is refused; what was begun ends by itself."""

    def __init__(self, limit_s: float = COMPILE_LIMIT_S) -> None:
        self._limit_s = limit_s
        self._pool: ThreadPoolExecutor | None = None

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        if self._pool is None:
            self._pool = _with_deep_stack()
        future = self._pool.submit(function, *arguments)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self._limit_s)
        except asyncio.TimeoutError:
            if future.cancelled():
                raise QueueFull("other answer formats are still being compiled; retry later") from None
            raise RequestError(
                "response_format", f"took longer than {self._limit_s:g} s to compile; simplify it"
            ) from None

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False)


def _with_deep_stack() -> ThreadPoolExecutor:
    """Threads take the stack size that is set while they start."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="kestrel-compile")
    before = threading.stack_size(STACK_BYTES)
    try:
        pool.submit(int)
    finally:
        threading.stack_size(before)
    return pool
