"""Several engines look like one: answers, refusals, losses, cancellations."""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from kestrel.engine.snapshot import EngineSnapshot
from kestrel.errors import ClusterFull, EngineStopped, QueueFull, RequestCancelled, RequestError
from kestrel.integrations.cluster.engine import ClusterEngine, added_up
from kestrel.integrations.cluster.replica import Message, Replica, ReplicaCall
from kestrel.server.config import ServerConfig
from kestrel.server.http import create_app
from tests.engine.conftest import picture
from tests.engine.fake_engine import fake_engine
from tests.integrations.cluster.in_process import LocalReplicas, cluster_of

SAMPLED = {"temperature": 1.0, "seed": 5}


@asynccontextmanager
async def cluster(num_replicas: int = 2, **changes: Any) -> AsyncIterator[tuple[ClusterEngine, LocalReplicas]]:
    replicas = LocalReplicas(num_replicas, **changes)
    engine = cluster_of(replicas)
    try:
        yield engine, replicas
    finally:
        await engine.shutdown(drain=False)
        await replicas.close()


def png(name: str = "small") -> bytes:
    return picture(name).read_bytes()


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("query", {"image": "small", "question": "what is the cat?", "reasoning": False, "max_tokens": 12, **SAMPLED}),
    ("query", {"question": "what?", "reasoning": True, "max_tokens": 12, **SAMPLED}),
    ("detect", {"image": "small", "object": "cat", "max_objects": 3}),
    ("detect", {"image": "small", "object": ["cat", "dog", "sun"], "max_objects": 2}),
    ("complete", {"prompt": "abc", "max_tokens": 9, "echo": True, "logprobs": 2}),
    ("embed", {"text": "abc"}),
]


@pytest.mark.parametrize(("skill", "fields"), CALLS)
async def test_answers_are_those_of_one_engine(skill: str, fields: dict[str, Any]) -> None:
    fields = {**fields, **({"image": png(fields["image"])} if "image" in fields else {})}
    single = fake_engine()
    expected = await single.run(skill, **fields)
    async with cluster() as (engine, _):
        result = await engine.run(skill, **fields)
        assert (result.output, result.text, result.finish_reason) == (
            expected.output,
            expected.text,
            expected.finish_reason,
        )
        if skill != "embed":
            ours = await engine.run(skill, stream=True, **fields)
            theirs = await single.run(skill, stream=True, **fields)
            key = lambda chunk: (str(chunk.data), chunk.token_index)  # noqa: E731 - parts of a joint call interleave
            assert sorted([c async for c in ours], key=key) == sorted([c async for c in theirs], key=key)
            assert (await ours.result()).output == expected.output
            assert ours.num_prompt_tokens == theirs.num_prompt_tokens > 0
    await single.shutdown()


async def test_a_crowd_loses_and_repeats_nothing_while_replicas_are_lost() -> None:
    single, dice = fake_engine(), random.Random(3)
    fields = [{"image": png(), "object": f"cat {number}", "max_objects": 12} for number in range(64)]
    expected = [(await single.run("detect", **one)).output["objects"] for one in fields]
    await single.shutdown()
    async with cluster(3, num_steps=12) as (engine, replicas):

        async def ask(one: dict[str, Any], is_stream: bool) -> None:
            asked = await engine.run("detect", **one, stream=is_stream)
            told.append([chunk.data async for chunk in asked] if is_stream else asked.output["objects"])
            answers[one["object"]] = (await asked.result()).output["objects"] if is_stream else asked.output["objects"]

        told, answers = [], {}
        asking = asyncio.gather(*(ask(one, number % 2 == 0) for number, one in enumerate(fields)))
        for name in ("r0", "r1"):
            while len(replicas.calls) < len(fields):
                await asyncio.sleep(0)
            for _ in range(dice.randrange(100)):
                await asyncio.sleep(0)
            replicas.add(f"beside {name}")
            replicas.lose(name)
        replicas.open()
        await asking
        assert [answers[one["object"]] for one in fields] == expected
        assert sorted(told, key=str) == sorted(expected, key=str)
        assert any(call.fields["resumed"] for _, call in replicas.calls)
        assert engine.snapshot().retries_total > 0


async def test_a_stream_goes_on_from_the_tokens_that_were_told() -> None:
    async with cluster(2, num_steps=9) as (engine, replicas):
        stream = await engine.run("detect", image=png(), object="cat", max_objects=9, stream=True)
        first = await stream.chunks()
        [(name, _)] = replicas.calls
        replicas.lose(name)
        replicas.open()
        rest = [chunk async for chunk in stream]
        other, again = replicas.calls[1]
        assert other != name
        assert again.avoid == {name}
        assert len(again.fields["resumed"]) == first[-1].token_index > 0
        assert [chunk.data for chunk in [*first, *rest]] == (await stream.result()).output["objects"]
        assert engine.snapshot().retries_total == 1


async def test_a_request_is_sent_to_another_replica_twice_and_no_more() -> None:
    async with cluster(4) as (engine, replicas):
        for replica in replicas.replicas.values():
            replica.engine.fail(RuntimeError("the device is gone"))
        with pytest.raises(EngineStopped, match="3 engines were lost"):
            await engine.run("complete", prompt="abc", max_tokens=3)
        assert len({name for name, _ in replicas.calls}) == len(replicas.calls) == 3
        assert engine.snapshot().retries_total == 2
        with pytest.raises(EngineStopped):
            replicas.replicas["r0"].require_healthy()


async def test_a_replica_whose_step_hangs_is_not_healthy() -> None:
    async with cluster(1, num_steps=1) as (engine, replicas):
        replica = replicas.replicas["r0"]
        replica.require_healthy()
        hasty = Replica("r0", replica.engine, replica.description, step_timeout_s=0.0)
        asking = asyncio.ensure_future(engine.run("complete", prompt="abc", max_tokens=9))
        while replica.engine.busy_since_s is None:
            await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        with pytest.raises(EngineStopped, match="no step of r0"):
            hasty.require_healthy()
        replicas.open()
        await asking
        while replica.engine.busy_since_s is not None:
            await asyncio.sleep(0)
        hasty.require_healthy()


async def test_refusals_come_from_the_replica_and_are_not_retried() -> None:
    async with cluster(2, max_queue_size=1) as (engine, replicas):
        with pytest.raises(RequestError, match="max_tokens"):
            await engine.run("complete", prompt="abc", max_tokens=-1)
        assert len(replicas.calls) == 1
        asked = [engine.run("complete", prompt="abc", max_tokens=500) for _ in range(80)]
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(one) for one in outcomes if isinstance(one, Exception)} == {ClusterFull}
        assert engine.snapshot().retries_total == 0


async def test_a_cancelled_request_ends_in_its_replica() -> None:
    async with cluster(1, num_steps=9) as (engine, replicas):
        stream = await engine.run("detect", image=png(), object="cat", max_objects=90, stream=True, request_id="mine")
        await stream.chunks()
        assert engine.has_begun("mine")
        engine.cancel("mine")
        with pytest.raises(RequestCancelled):
            await stream.result()
        replicas.open()
        while engine.num_requests or replicas.replicas["r0"].engine.num_requests:
            await asyncio.sleep(0)


async def test_an_answered_request_leaves_its_place_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(1, max_queue_size=1) as (engine, replicas):
        ask, has_ended = replicas.ask, asyncio.Event()

        async def ask_and_linger(call: ReplicaCall) -> AsyncGenerator[Sequence[Message], None]:
            async for messages in ask(call):
                yield messages
            await has_ended.wait()

        monkeypatch.setattr(replicas, "ask", ask_and_linger)
        for _ in range(engine.max_requests + 1):
            await engine.run("complete", prompt="abc", max_tokens=3, request_id="mine")
        has_ended.set()


async def test_a_request_that_is_ended_before_its_first_turn_leaves_nothing_behind() -> None:
    async with cluster(1) as (engine, _):
        asking = asyncio.ensure_future(engine.run("complete", prompt="abc", max_tokens=3, request_id="mine"))
        asyncio.get_running_loop().call_soon(engine.cancel, "mine")
        with pytest.raises(RequestCancelled):
            await asyncio.wait_for(asking, 30)
        assert engine.num_requests == 0
        await engine.run("complete", prompt="abc", max_tokens=3, request_id="mine")


async def test_the_queue_s_room_is_shared_by_clients() -> None:
    async with cluster(1, num_steps=1, max_queue_size=6) as (engine, replicas):

        async def ask(client: str) -> type[Exception] | None:
            try:
                await engine.run("complete", prompt="abc", max_tokens=3, client=client)
            except QueueFull as error:
                return type(error)
            return None

        greedy = [asyncio.ensure_future(ask("greedy")) for _ in range(engine.max_requests)]
        while len(replicas.calls) < engine.max_requests:
            await asyncio.sleep(0)
        modest = asyncio.ensure_future(ask("modest"))
        refused, _ = await asyncio.wait(greedy, return_when=asyncio.FIRST_COMPLETED, timeout=30)
        assert [one.result() for one in refused] == [ClusterFull]
        replicas.open()
        assert await modest is None


async def test_where_one_replica_is_full_another_one_gets_the_request() -> None:
    """All have one beginning, which one replica knows."""
    async with cluster(2, num_steps=0, max_queue_tokens=600) as (engine, replicas):
        start = "the same beginning of a long prompt, again and again. " * 10
        asked: list[asyncio.Future[Any]] = []
        for number in range(6):
            asked.append(asyncio.ensure_future(engine.run("complete", prompt=f"{start}{number}", max_tokens=3)))
            while len(replicas.calls) <= number:
                await asyncio.sleep(0)
            await asyncio.sleep(0.01)
        refused, _ = await asyncio.wait(asked, timeout=0.2)
        waiting = [replica.engine.num_requests for replica in replicas.replicas.values()]
        assert min(waiting) > 0
        assert sum(waiting) + len(refused) == len(asked)
        assert {type(one.exception()) for one in refused} <= {ClusterFull}
        assert engine.snapshot().retries_total == 0


async def test_counters_do_not_fall_when_a_replica_is_gone() -> None:
    async with cluster(2) as (engine, replicas):
        await asyncio.gather(*(engine.run("complete", prompt=f"{number} abc", max_tokens=3) for number in range(8)))
        before = engine.snapshot()
        gone = replicas.replicas.pop("r0")
        after = engine.snapshot()
        assert (before.num_replicas, after.num_replicas) == (2, 1)
        assert gone.engine.snapshot().prefix_query_tokens_total > 0
        assert after.prefix_query_tokens_total == before.prefix_query_tokens_total
        replicas.replicas["r0"] = gone


async def test_every_request_has_a_seed_that_the_cluster_draws() -> None:
    drawn = []
    for _ in range(2):
        replicas = LocalReplicas(1)
        engine = cluster_of(replicas, seed=11)
        await engine.run("complete", prompt="abc", max_tokens=3, temperature=1.0)
        await engine.run("complete", prompt="abc", max_tokens=3, settings={"temperature": 1.0, "seed": 4})
        drawn.append([call.fields.get("seed") for _, call in replicas.calls])
        await engine.shutdown()
        await replicas.close()
    assert drawn[0] == drawn[1]
    assert drawn[0][0] is not None
    assert drawn[0][1] is None


async def test_questions_about_a_picture_go_to_the_replica_that_has_it() -> None:
    async with cluster(4) as (engine, replicas):
        for number in range(40):
            file = png("small") + bytes([number % 4])
            await engine.run("query", image=file, question=f"{number}?", reasoning=False, max_tokens=2)
        by_picture = [{name for name, _ in replicas.calls[start::4]} for start in range(4)]
        assert [len(names) for names in by_picture] == [1] * 4


async def test_the_server_answers_over_a_cluster_as_over_an_engine() -> None:
    body = {
        "image_url": base64.b64encode(png()).decode(),
        "question": "what?",
        "settings": {"max_tokens": 5, "seed": 1},
    }
    async with cluster(2) as (engine, _):
        app = create_app(engine, ServerConfig(api_keys=("k",)))
        async with app.router.lifespan_context(app):
            await app.state.kestrel.settled.wait()
            headers = {"authorization": "Bearer k"}
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as client:
                plain = await client.post("/v1/query", json=body)
                assert plain.json()["answer"]
                chat = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "n": 3, "max_tokens": 4}
                assert len((await client.post("/v1/chat/completions", json=chat)).json()["choices"]) == 3
                refused = await client.post("/v1/query", json={**body, "question": 5})
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, "question")
                assert (await client.post("/v1/query", json=body, headers={"authorization": ""})).status_code == 401
                assert "kestrel_replicas" in (await client.get("/metrics")).text
                assert (await client.get("/model_info")).json()["max_model_len"] == engine.max_model_length


def test_numbers_of_replicas_add_up() -> None:
    one = EngineSnapshot(1, 2, 100, 25, 30, 16, 8, 500, 200, 11, 2, running_adapters=("a",), kept_adapters=("a", "b"))
    two = EngineSnapshot(3, 0, 100, 5, 10, 16, 8, 100, 50, 1, 0, running_adapters=("c",), kept_adapters=("a",))
    both = added_up([one, two])
    assert (both.num_running, both.num_waiting, both.num_pages, both.page_size, both.num_replicas) == (4, 2, 200, 16, 2)
    assert both.kept_adapters == ("a", "b")
    assert both.running_adapters == ("a", "c")
    assert (added_up([]).num_replicas, added_up([]).kv_usage) == (0, 0.0)
