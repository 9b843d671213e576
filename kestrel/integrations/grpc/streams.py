"""One ModelStreamInfer call: many requests side by side, their answers in the order in which they are there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeAlias

from kestrel.errors import DeadlineExceeded
from kestrel.integrations.grpc.host import Interruption

MAX_REQUESTS = 64
"""Unanswered requests of one stream; the next is read when one of them is done."""
STALL_S = 1.0
"""A write that is as old as this when its request must be over has a client that does not read."""

Write: TypeAlias = Callable[[Any], Coroutine[Any, Any, None]]
AnswerAll: TypeAlias = Callable[[Any, Write], Coroutine[Any, Any, None]]


class ClientGone(Exception):
    """Nobody reads the answers any more."""


@dataclass(frozen=True)
class StreamLimits:
    idle_s: float
    """What the next request may take while none is running."""
    request_s: float
    """What an answer may take; the call ends when its client does not read it until then."""


class StreamSession:
    """`answer_all(request, write)` answers one request, refusals included. After `closing` no more are read.

    `stall` ends the call when its client does not read.
    """

    def __init__(
        self, answer_all: AnswerAll, write: Write, closing: asyncio.Event, limits: StreamLimits, stall: Interruption
    ) -> None:
        self._answer_all = answer_all
        self._write = write
        self._closing = closing
        self._limits = limits
        self._stall = stall
        self._room = asyncio.Semaphore(MAX_REQUESTS)
        self._one_at_a_time = asyncio.Lock()
        self._writing_since_s: float | None = None
        self._is_over = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, requests: AsyncIterator[Any]) -> None:
        """Until the client has sent its last request and all are answered. Cancelled, it ends those still running."""
        closing = asyncio.ensure_future(self._closing.wait())
        with self._stall:
            try:
                while (request := await self._next(requests, closing)) is not None:
                    task = asyncio.create_task(self._answer(request))
                    self._tasks.add(task)
                    task.add_done_callback(self._put_aside)
                while self._tasks:
                    await asyncio.wait(self._tasks)
            finally:
                self._is_over = True
                left = {closing, *self._tasks}
                for task in left:
                    task.cancel()
                await asyncio.gather(*left, return_exceptions=True)

    async def _next(self, requests: AsyncIterator[Any], closing: asyncio.Future[Any]) -> Any | None:
        """The next request, once there is room for it; None at the end of them, or when the server closes."""
        await self._room.acquire()
        coming = asyncio.ensure_future(anext(requests, None))
        idle_s = self._limits.idle_s
        try:
            while True:
                await asyncio.wait({coming, closing}, timeout=idle_s, return_when=asyncio.FIRST_COMPLETED)
                if coming.done() or closing.done():
                    return coming.result() if coming.done() else None
                if not self._tasks:
                    raise DeadlineExceeded(
                        f"no request came for {idle_s:g} s (stream_idle_timeout_s); open a new stream"
                    )
        finally:
            coming.cancel()

    async def _answer(self, request: Any) -> None:
        watch = _Deadline(self._limits.request_s, self._end_if_stalled)
        try:
            await self._answer_all(request, self._write_in_turn)
        finally:
            watch.stop()
            self._room.release()

    def _end_if_stalled(self) -> bool:
        """Whether the call is ended. A client that reads gets what is left, such as the refusal."""
        since_s = self._writing_since_s
        if since_s is None or asyncio.get_running_loop().time() - since_s < STALL_S:
            return False
        self._stall.interrupt()
        return True

    async def _write_in_turn(self, response: Any) -> None:
        """Waits while the client does not read, and so does whoever makes the answers. Raises ClientGone."""
        async with self._one_at_a_time:
            self._writing_since_s = asyncio.get_running_loop().time()
            try:
                await self._write(response)
            except asyncio.CancelledError:
                if not self._is_over:
                    self._stall.interrupt()  # gRPC takes no other write after one that was given up
                raise
            except Exception as error:
                raise ClientGone from error
            finally:
                self._writing_since_s = None

    def _put_aside(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # ClientGone: the call ends as well


class _Deadline:
    """Asks `is_ended` after so many seconds, and again until it says yes."""

    def __init__(self, seconds: float, is_ended: Callable[[], bool]) -> None:
        self._is_ended = is_ended
        self._timer = asyncio.get_running_loop().call_later(seconds, self._ask)

    def stop(self) -> None:
        self._timer.cancel()

    def _ask(self) -> None:
        if not self._is_ended():
            self._timer = asyncio.get_running_loop().call_later(STALL_S, self._ask)
