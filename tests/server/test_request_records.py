"""Records: every request ends with exactly one, and with an id that the client sees."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from kestrel.server.records import RequestRecord
from tests.server.recorded_app import METRICS, client_of, recorded, served


async def test_a_record_has_what_the_handler_put_in_and_what_the_layer_saw() -> None:
    seen: list[RequestRecord] = []
    async with client_of(recorded([seen.append])) as client:
        answer = await client.post("/v1/query", json={})
    (record,) = seen
    assert (record.method, record.route, record.status) == ("POST", "/v1/{skill}", 200)
    assert (record.skill, record.metrics, record.finish_reason) == ("query", METRICS, "stop")
    assert not record.client_gone
    assert record.latency_s > 0
    assert answer.headers["x-request-id"] == answer.json()["request_id"] == record.request_id


@pytest.mark.parametrize(("given", "kept"), [("trace-77:a.b_c", True), ("two words", False), ("x" * 129, False)])
async def test_a_plain_id_of_the_client_is_kept_and_another_replaced(given: str, kept: bool) -> None:
    async with client_of(recorded([])) as client:
        answer = await client.post("/v1/query", headers={"x-request-id": given})
    assert (answer.headers["x-request-id"] == given) is kept
    assert len(answer.headers["x-request-id"]) == (len(given) if kept else 32)


async def test_an_id_the_handler_chose_is_the_records_id() -> None:
    seen: list[RequestRecord] = []
    async with client_of(recorded([seen.append])) as client:
        answer = await client.get("/v1/busy")
    assert seen[0].request_id == answer.headers["x-request-id"] == "chosen-by-the-handler"
    assert (seen[0].status, seen[0].error_type) == (503, "QueueFull")


async def test_a_crash_is_recorded_as_500() -> None:
    seen: list[RequestRecord] = []
    async with client_of(recorded([seen.append])) as client:
        assert (await client.get("/v1/crash")).status_code == 500
    assert (seen[0].status, seen[0].error_type, seen[0].client_gone) == (500, "RuntimeError", False)


async def test_a_client_that_leaves_a_stream_is_recorded_as_gone() -> None:
    seen: list[RequestRecord] = []
    async with served(recorded([seen.append])) as address, httpx.AsyncClient() as client:
        async with client.stream("GET", f"{address}/v1/endless") as answer:
            async for _ in answer.aiter_raw():
                break
        for _ in range(400):
            if seen:
                break
            await asyncio.sleep(0.005)
    assert [(r.route, r.status, r.client_gone) for r in seen] == [("/v1/endless", 200, True)]


async def test_a_client_that_gets_all_of_its_answer_is_not_gone() -> None:
    seen: list[RequestRecord] = []
    async with served(recorded([seen.append])) as address, httpx.AsyncClient() as client:
        assert (await client.post(f"{address}/v1/caption", json={})).status_code == 200
    assert [(r.skill, r.client_gone) for r in seen] == [("caption", False)]
