"""One stream of many requests, without a network: clients that leave, slow readers, a server that closes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kestrel.errors import DeadlineExceeded
from kestrel.integrations.grpc.services import MAX_REQUESTS, AnswerAll, ClientGone, StreamLimits, StreamSession, Write
from kestrel.server.calls import Interruption


class Stalled(Exception):
    """What ends a call whose client does not read."""


def session(answer: AnswerAll, write: Write, closing: asyncio.Event | None = None, **limits: float) -> StreamSession:
    bounds = StreamLimits(**{"idle_s": 60.0, "request_s": 60.0, **limits})
    return StreamSession(answer, write, closing or asyncio.Event(), bounds, Interruption(Stalled()))


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

    await session(answer, write).serve(requests(20))
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

    await session(answer, write).serve(requests(5))


async def test_no_more_requests_are_read_than_may_be_unanswered() -> None:
    num_running, most, go_on = 0, 0, asyncio.Event()

    async def answer(request: int, write: Write) -> None:
        nonlocal num_running, most
        num_running += 1
        most = max(most, num_running)
        await go_on.wait()
        num_running -= 1

    async def write(response: int) -> None: ...

    serving = asyncio.create_task(session(answer, write).serve(requests(MAX_REQUESTS + 10)))
    while most < MAX_REQUESTS:
        await asyncio.sleep(0.001)
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

    serving = asyncio.create_task(session(answer, write).serve(requests(3, asyncio.Event().wait)))
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

    serving = session(answer, write, closing).serve(requests(1, asyncio.Event().wait))
    await asyncio.wait_for(serving, 60)
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

    await session(answer, write).serve(requests(1))
    assert seen == [ClientGone]


# ---------------------------------------------------------------------- limits


async def test_a_client_who_does_not_read_ends_the_call_and_all_its_requests() -> None:
    ended: list[int] = []

    async def answer(request: int, write: Write) -> None:
        try:
            await write(request)
        finally:
            ended.append(request)

    async def write(response: int) -> None:
        await asyncio.Event().wait()

    serving = session(answer, write, request_s=0.1).serve(requests(MAX_REQUESTS + 10))
    with pytest.raises(Stalled):
        await asyncio.wait_for(serving, 60)
    assert sorted(ended) == list(range(MAX_REQUESTS))


async def test_a_request_that_is_late_ends_no_call_whose_client_reads() -> None:
    written: list[int] = []

    async def answer(request: int, write: Write) -> None:
        await asyncio.sleep(1.5 * request)
        await write(request)

    async def write(response: int) -> None:
        written.append(response)

    await session(answer, write, request_s=0.01).serve(requests(2))
    assert written == [0, 1]


async def test_after_a_write_that_was_given_up_the_call_ends() -> None:
    async def answer(request: int, write: Write) -> None:
        await asyncio.wait_for(write(request), 0.02)

    async def write(response: int) -> None:
        await asyncio.Event().wait()

    with pytest.raises(Stalled):
        await asyncio.wait_for(session(answer, write).serve(requests(1, asyncio.Event().wait)), 60)


async def test_a_stream_without_requests_ends_and_one_that_waits_for_answers_does_not() -> None:
    written: list[int] = []

    async def answer(request: int, write: Write) -> None:
        await asyncio.sleep(0.3)
        await write(request)

    async def write(response: int) -> None:
        written.append(response)

    serving = session(answer, write, idle_s=0.1).serve(requests(1, asyncio.Event().wait))
    with pytest.raises(DeadlineExceeded, match="stream_idle_timeout_s"):
        await asyncio.wait_for(serving, 60)
    assert written == [0]
