"""Named thread pools, one for each kind of slow work, and long work in Python that leaves other threads the GIL."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
Entry = TypeVar("Entry")


class Threads:
    """A few threads for one kind of work, started when they are first needed."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=f"kestrel-{name}")

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """The result of a blocking call. A cancelled caller leaves immediately; what was begun ends by itself."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    def close(self) -> None:
        """Take nothing more; what was begun ends by itself, what waits is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)


STRETCH_S = 0.001


class Pace:
    """For a thread of its own, never for the event loop: `rest` between small pieces of work.

    A thread that computes holds the GIL for milliseconds at a time, and the worker needs it back for every operation of
    a step. So such work rests as often and as long as it computes.
    """

    def __init__(self, is_needed: Callable[[], bool] = lambda: True) -> None:
        """`is_needed`: whether somebody gains by a rest now."""
        self._is_needed = is_needed
        self._since_s = time.perf_counter()

    def rest(self) -> None:
        worked_s = time.perf_counter() - self._since_s
        if worked_s > STRETCH_S:
            if self._is_needed():
                time.sleep(worked_s)
            self._since_s = time.perf_counter()


def listed(entries: Iterable[Entry]) -> list[Entry]:
    """The entries, made one by one with rests."""
    pace = Pace()
    made: list[Entry] = []
    for entry in entries:
        made.append(entry)
        pace.rest()
    return made
