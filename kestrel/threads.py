"""Named thread pools: each kind of slow work has its own, so that it waits only behind work of its kind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class Threads:
    """A few threads for one kind of work, started when they are first needed."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=f"kestrel-{name}")

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """The result of a blocking call. A caller that is cancelled leaves at once; what was begun ends by itself."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    def close(self) -> None:
        """Take nothing more; what was begun ends by itself, what waits is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)
