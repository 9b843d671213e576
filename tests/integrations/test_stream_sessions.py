"""One stream of many requests, without a network: clients that leave, slow readers, a server that closes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kestrel.integrations.grpc.streams import MAX_REQUESTS, ClientGone, StreamSession, Write


async def requests(number: int, then: Callable[[], Any] | None = None) -> AsyncIterator[int]:
    for index in range(number):
        yield index
    if then is not None:
        await then()


async def test_every_request_is_answered_before_the_call_ends() -> None:
    written: list[int] = []

    async def answer(request: int, write: Write) -> None:
        await asyncio.sleep(0.001 * (request % 3))
        await write(request)

    async def write(response: int) -> None:
        written.append(response)

    await StreamSession(answer, write, asyncio.Event()).serve(requests(20))
    assert sorted(written) == list(range(20))


async def test_responses_are_written_one_at_a_time() -> None:
    writing = 0

    async def answer(request: int, write: Write) -> None:
        await write(request)

    async def write(response: int) -> None:
        nonlocal writing
        writing += 1
        assert writing == 1
        await asyncio.sleep(0.001)
        writing -= 1

    await StreamSession(answer, write, asyncio.Event()).serve(requests(5))


async def test_no_more_requests_are_read_than_may_be_unanswered() -> None:
    num_running, most, go_on = 0, 0, asyncio.Event()

    async def answer(request: int, write: Write) -> None:
        nonlocal num_running, most
        num_running += 1
        most = max(most, num_running)
        await go_on.wait()
        num_running -= 1

    async def write(response: int) -> None: ...

    serving = asyncio.create_task(StreamSession(answer, write, asyncio.Event()).serve(requests(MAX_REQUESTS + 10)))
    await asyncio.sleep(0.05)
    assert most == MAX_REQUESTS
    go_on.set()
    await serving
    assert (num_running, most) == (0, MAX_REQUESTS)


async def test_a_cancelled_call_ends_the_requests_that_run() -> None:
    ended: list[int] = []

    async def answer(request: int, write: Write) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(request)

    async def write(response: int) -> None: ...

    serving = asyncio.create_task(
        StreamSession(answer, write, asyncio.Event()).serve(requests(3, asyncio.Event().wait))
    )
    await asyncio.sleep(0.02)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert sorted(ended) == [0, 1, 2]


async def test_a_closing_server_reads_no_more_and_finishes_what_it_has() -> None:
    closing, written = asyncio.Event(), []

    async def answer(request: int, write: Write) -> None:
        closing.set()
        await asyncio.sleep(0.01)
        await write(request)

    async def write(response: int) -> None:
        written.append(response)

    serving = StreamSession(answer, write, closing).serve(requests(1, asyncio.Event().wait))
    await asyncio.wait_for(serving, 5)
    assert written == [0]


async def test_a_broken_connection_is_no_failure_of_the_request() -> None:
    seen: list[type[BaseException]] = []

    async def answer(request: int, write: Write) -> None:
        try:
            await write(request)
        except Exception as error:
            seen.append(type(error))
            raise

    async def write(response: int) -> None:
        raise OSError("broken")

    await StreamSession(answer, write, asyncio.Event()).serve(requests(1))
    assert seen == [ClientGone]
