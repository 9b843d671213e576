"""A block ended from a callback: its own error, a clean-up in between, and nothing left behind."""

from __future__ import annotations

import asyncio
import sys

import pytest

from kestrel.server.calls import Interruption


class Late(Exception):
    pass


async def interrupted(seen: list[str]) -> None:
    with Interruption(Late()) as block:
        asyncio.get_running_loop().call_soon(block.interrupt)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            seen.append("cleaned up")


def test_the_block_ends_with_the_error_after_its_clean_up() -> None:
    async def run() -> list[str]:
        seen: list[str] = []
        with pytest.raises(Late):
            await interrupted(seen)
        await asyncio.sleep(0)  # a cancellation left behind would end this
        seen.append("went on")
        return seen

    assert asyncio.run(run()) == ["cleaned up", "went on"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tasks count their cancellations from 3.11 on")
def test_the_task_does_not_count_as_cancelled_afterwards() -> None:
    async def run() -> int:
        with pytest.raises(Late):
            await interrupted([])
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    assert asyncio.run(run()) == 0


def test_an_interruption_after_the_block_does_nothing() -> None:
    async def run() -> str:
        with Interruption(Late()) as block:
            await asyncio.sleep(0)
        block.interrupt()
        await asyncio.sleep(0)
        return "went on"

    assert asyncio.run(run()) == "went on"


def test_a_cancellation_from_elsewhere_stays_one() -> None:
    async def wait() -> None:
        with Interruption(Late()):
            await asyncio.sleep(60)

    async def run() -> None:
        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def test_an_error_of_the_block_is_not_replaced() -> None:
    async def run() -> None:
        with Interruption(Late()):
            raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        asyncio.run(run())
