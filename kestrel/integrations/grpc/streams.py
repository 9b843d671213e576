"""One ModelStreamInfer call: many requests side by side, their answers in the order in which they are there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeAlias

from kestrel.integrations.grpc.protocol import Message

MAX_REQUESTS = 64
"""Unanswered requests of one stream; the next is read when one of them is done."""
MAX_ANSWERS = 16
"""Answers that wait for the client to read; those who make them wait too."""

Put: TypeAlias = Callable[[Message], Coroutine[Any, Any, None]]
AnswerAll: TypeAlias = Callable[[Message, Put], Coroutine[Any, Any, None]]


class StreamSession:
    """`answer_all(request, put)` answers one request, refusals included. After `closing` no more requests are read."""

    def __init__(self, answer_all: AnswerAll, closing: asyncio.Event) -> None:
        self._answer_all = answer_all
        self._closing = closing
        self._waiting: asyncio.Queue[Message | None] = asyncio.Queue(MAX_ANSWERS)
        self._room = asyncio.Semaphore(MAX_REQUESTS)
        self._tasks: set[asyncio.Task[None]] = set()

    async def responses(self, requests: AsyncIterator[Message]) -> AsyncIterator[Message]:
        reading = asyncio.create_task(self._read(requests))
        try:
            while (response := await self._waiting.get()) is not None:
                yield response
            await reading
        finally:
            left = {reading, *self._tasks}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[Message]) -> None:
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            while (request := await _first(anext(requests, None), closing)) is not None:
                await self._room.acquire()
                task = asyncio.create_task(self._answer(request))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        finally:
            closing.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._waiting.put(None)

    async def _answer(self, request: Message) -> None:
        try:
            await self._answer_all(request, self._waiting.put)
        finally:
            self._room.release()


async def _first(coming: Awaitable[Message | None], closing: asyncio.Future[Any]) -> Message | None:
    """The next request; None at the end of them, or when the server closes."""
    next_one = asyncio.ensure_future(coming)
    try:
        await asyncio.wait({next_one, closing}, return_when=asyncio.FIRST_COMPLETED)
        return next_one.result() if next_one.done() else None
    finally:
        next_one.cancel()
