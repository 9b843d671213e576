"""Work that several callers want at the same time is done once; it ends early when nobody wants it any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kestrel.errors import EngineStopped

Value = TypeVar("Value")


@dataclass
class _Flight(Generic[Value]):
    task: asyncio.Task[Value]
    num_waiting: int = 0


class SingleFlight(Generic[Value]):
    """One task per key, for one event loop."""

    def __init__(self) -> None:
        self._flights: dict[str, _Flight[Value]] = {}
        self._tasks: set[asyncio.Task[Value]] = set()
        self._closed = False

    @property
    def num_running(self) -> int:
        return len(self._tasks)

    async def join(self, key: str, start: Callable[[], Coroutine[Any, Any, Value]]) -> Value:
        """The result of the task under this key, which is started when there is none."""
        if self._closed:
            raise EngineStopped("no more adapters are read: the engine has shut down")
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(start()))
            self._tasks.add(flight.task)
            flight.task.add_done_callback(lambda task: self._landed(key, task))
        flight.num_waiting += 1
        try:
            return await asyncio.shield(flight.task)
        except asyncio.CancelledError:
            if self._closed and flight.task.cancelled():
                raise EngineStopped("the engine was shut down while an adapter was read") from None
            raise
        finally:
            flight.num_waiting -= 1
            if flight.num_waiting == 0 and not flight.task.done():
                self._forget(key, flight.task)
                flight.task.cancel()

    async def close(self) -> None:
        """Ends all tasks; those who wait for them get EngineStopped."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _landed(self, key: str, task: asyncio.Task[Value]) -> None:
        self._tasks.discard(task)
        self._forget(key, task)
        if not task.cancelled():
            task.exception()  # Seen, also when all who waited have gone.

    def _forget(self, key: str, task: asyncio.Task[Value]) -> None:
        """A caller who comes after the last one left must not join a task that is being cancelled."""
        if key in self._flights and self._flights[key].task is task:
            del self._flights[key]
