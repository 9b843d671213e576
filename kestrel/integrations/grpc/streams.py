"""One ModelStreamInfer call: many requests side by side, their answers in the order in which they are there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeAlias

from kestrel.integrations.grpc.protocol import Message

MAX_REQUESTS = 64
"""Unanswered requests of one stream; the next is read when one of them is done."""

Write: TypeAlias = Callable[[Message], Coroutine[Any, Any, None]]
AnswerAll: TypeAlias = Callable[[Message, Write], Coroutine[Any, Any, None]]


class ClientGone(Exception):
    """Nobody reads the answers any more."""


class StreamSession:
    """`answer_all(request, write)` answers one request, refusals included. After `closing` no more are read."""

    def __init__(self, answer_all: AnswerAll, write: Write, closing: asyncio.Event) -> None:
        self._answer_all = answer_all
        self._write = write
        self._closing = closing
        self._room = asyncio.Semaphore(MAX_REQUESTS)
        self._one_at_a_time = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, requests: AsyncIterator[Message]) -> None:
        """Until the client has sent its last request and all are answered. Cancelled, it ends those still running."""
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            while (request := await _first(anext(requests, None), closing)) is not None:
                await self._room.acquire()
                task = asyncio.create_task(self._answer(request))
                self._tasks.add(task)
                task.add_done_callback(self._put_aside)
            while self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            left = {closing, *self._tasks}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _answer(self, request: Message) -> None:
        try:
            await self._answer_all(request, self._write_in_turn)
        finally:
            self._room.release()

    async def _write_in_turn(self, response: Message) -> None:
        """Waits while the client does not read, and so does whoever makes the answers. Raises ClientGone."""
        async with self._one_at_a_time:
            try:
                await self._write(response)
            except Exception as error:
                raise ClientGone from error

    def _put_aside(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # ClientGone: the call ends as well


async def _first(coming: Awaitable[Message | None], closing: asyncio.Future[Any]) -> Message | None:
    """The next request; None at the end of them, or when the server closes."""
    next_one = asyncio.ensure_future(coming)
    try:
        await asyncio.wait({next_one, closing}, return_when=asyncio.FIRST_COMPLETED)
        return next_one.result() if next_one.done() else None
    finally:
        next_one.cancel()
