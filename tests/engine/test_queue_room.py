"""Who is let in when the queue is full."""

from __future__ import annotations

import asyncio
import time

import pytest

from kestrel.engine.intake import QueueRoom
from kestrel.errors import QueueFull
from kestrel.runtime.contract import StepOutput
from kestrel.runtime.fake import FakeRuntime, FakeStep
from tests.engine.fake_engine import fake_engine, fake_limits


def room(max_requests: int = 4, max_tokens: int | None = None, begun: tuple[str, ...] = ()) -> QueueRoom:
    return QueueRoom(lambda: max_requests, max_tokens, begun.__contains__)


def fill(queue: QueueRoom, client: str | None, number: int) -> None:
    for index in range(number):
        assert queue.enter(f"{client}{index}", client) == []


@pytest.mark.parametrize("client", [None, "a"])
def test_one_client_alone_may_use_all_of_it_and_no_more(client: str | None) -> None:
    queue = room()
    fill(queue, client, 4)
    with pytest.raises(QueueFull, match="4 requests are unanswered \\(max_queue_size\\)"):
        queue.enter("more", client)
    queue.leave(f"{client}0")
    assert queue.enter("more", client) == []


def test_a_newcomer_takes_the_newest_place_of_whoever_has_the_most() -> None:
    queue = room(6)
    fill(queue, "a", 4)
    fill(queue, "b", 2)
    assert queue.enter("c0", "c") == ["a3"]
    assert queue.enter("c1", "c") == ["a2"]
    with pytest.raises(QueueFull):  # everybody has a third
        queue.enter("c2", "c")
    with pytest.raises(QueueFull):
        queue.enter("a4", "a")


def test_those_that_have_begun_stay() -> None:
    queue = room(begun=("a1", "a3"))
    fill(queue, "a", 4)
    assert queue.enter("b0", "b") == ["a2"]
    assert queue.enter("b1", "b") == ["a0"]
    assert queue.enter("c0", "c") == ["b1"]
    with pytest.raises(QueueFull):
        queue.enter("d0", "d")


def test_nobody_loses_the_only_one() -> None:
    queue = room(3)
    for client in ("a", "b", "c"):
        fill(queue, client, 1)
    with pytest.raises(QueueFull):
        queue.enter("d0", "d")


def weighed(queue: QueueRoom, request_id: str, client: str, num_tokens: int) -> list[str]:
    assert queue.enter(request_id, client) == []
    try:
        return queue.weigh(request_id, num_tokens)
    except QueueFull:
        queue.leave(request_id)
        raise


def test_a_queue_full_of_tokens_refuses_but_never_a_lone_request() -> None:
    begun: set[str] = set()
    queue = QueueRoom(lambda: 100, 10, begun.__contains__)
    assert weighed(queue, "large", "a", 15) == []
    with pytest.raises(QueueFull, match="15 prompt tokens are waiting \\(max_queue_tokens\\)"):
        weighed(queue, "next", "a", 1)
    begun.add("large")
    weighed(queue, "waits", "a", 8)
    weighed(queue, "fits", "a", 2)
    with pytest.raises(QueueFull, match="max_queue_tokens"):
        weighed(queue, "too much", "a", 1)


def test_tokens_are_shared_like_places() -> None:
    queue = room(100, 12)
    for index in range(4):
        weighed(queue, f"a{index}", "a", 3)
    assert weighed(queue, "b0", "b", 4) == ["a3", "a2"]
    assert weighed(queue, "b1", "b", 2) == []
    with pytest.raises(QueueFull):
        weighed(queue, "b2", "b", 1)
    with pytest.raises(QueueFull):  # a newcomer that needs more than the others can give
        weighed(queue, "c0", "c", 11)
    assert weighed(queue, "c1", "c", 1) == ["a1"]


@pytest.mark.parametrize("bound", ["max_queue_size", "max_queue_tokens"])
async def test_a_full_engine_answers_another_client_and_refuses_the_newest_of_the_first(bound: str) -> None:
    class Slow(FakeRuntime):
        """Slower than requests are read."""

        def collect(self, step: FakeStep) -> StepOutput:
            time.sleep(0.005)
            return super().collect(step)

    engine = fake_engine(Slow(fake_limits(), vocab_size=320), **{bound: 30 if bound == "max_queue_size" else 600})
    settings = {"reasoning": False, "temperature": 0.0, "max_new_tokens": 20}

    async def ask(name: str, client: str) -> str:
        try:
            await engine.query(question="what is the cat?", request_id=name, client=client, **settings)
        except QueueFull:
            return "refused"
        return "answered"

    flood = [asyncio.create_task(ask(f"a{index}", "a")) for index in range(200)]
    await asyncio.sleep(0)
    others = [asyncio.create_task(ask(f"b{index}", "b")) for index in range(5)]
    assert await asyncio.gather(*others) == ["answered"] * 5
    outcomes = await asyncio.gather(*flood)
    assert set(outcomes[:20]) == {"answered"}
    assert "refused" in outcomes
    assert engine._room._client_of == engine._room._tokens == {}
    await engine.shutdown()
