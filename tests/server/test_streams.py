"""Streams: framing byte by byte, order of events, failures in the middle, and clients that leave."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kestrel.engine.worker import Cancel
from kestrel.errors import NumericalError
from kestrel.server.config import ServerConfig
from kestrel.server.records import JsonLines
from tests.scene import SCENE
from tests.server.conftest import GREEDY, SCENE_URL, RunningServer, runtime_config, start_server
from tests.server.long_request import end_id_of, long_query
from tests.server.pages import Page
from tests.server.sockets import eventually, send


def read_stream(client: httpx.Client, skill: str, **fields: Any) -> bytes:
    with client.stream("POST", f"/v1/{skill}", json={**fields, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert "content-length" not in response.headers
        return b"".join(response.iter_raw())


def events_in(data: bytes) -> list[dict[str, Any]]:
    """Every event, by the letter: `data: `, one line of JSON, an empty line."""
    assert data.endswith(b"\n\n")
    frames = data.split(b"\n\n")[:-1]
    assert all(frame.startswith(b"data: ") and b"\n" not in frame and b"\r" not in frame for frame in frames)
    return [json.loads(frame[len(b"data: ") :]) for frame in frames]


def test_a_caption_comes_in_pieces_that_add_up(client: httpx.Client, server: RunningServer) -> None:
    events = events_in(read_stream(client, "caption", image_url=SCENE_URL, settings=GREEDY))
    whole = server.on_loop(lambda: server.engine.caption(SCENE, **GREEDY)).text
    *pieces, last = events
    assert len(pieces) > 3
    assert [piece.keys() for piece in pieces] == [{"chunk", "completed", "token_index"}] * len(pieces)
    assert not any(piece["completed"] for piece in pieces)
    indices = [piece["token_index"] for piece in pieces]
    assert indices == sorted(indices)
    assert "".join(event["chunk"] for event in events) == whole == last["caption"]
    assert last["completed"] is True
    assert last["finish_reason"] == "stop"
    assert last["metrics"]["output_tokens"] >= len(pieces)
    assert {"request_id", "processing_latency_s", "ttft_s"} <= last.keys()


def test_a_thoughtful_answer_streams_its_thoughts_apart_from_its_chunks(client: httpx.Client) -> None:
    fields = {"question": "How many bees are there?", "image_url": SCENE_URL, "settings": GREEDY, "reasoning": True}
    *pieces, last = events_in(read_stream(client, "query", **fields))
    thoughts = [piece for piece in pieces if piece.get("type") == "reasoning"]
    assert thoughts
    assert all("chunk" not in piece for piece in thoughts)
    assert "".join(piece["reasoning"] for piece in thoughts) == last["reasoning"]["text"]
    points = [point for piece in thoughts for point in piece.get("grounding", {}).get("points", ())]
    assert points == [point for ground in last["reasoning"]["grounding"] for point in ground["points"]] != []
    assert "".join(piece["chunk"] for piece in pieces if "chunk" in piece) == last["answer"] == "3"


def test_an_outline_streams_its_box_its_path_and_the_whole(client: httpx.Client) -> None:
    events = events_in(read_stream(client, "segment", image_url=SCENE_URL, object="red cross", settings=GREEDY))
    assert events[0]["type"] == "bbox"
    assert {event["type"] for event in events[1:-1]} == {"path_delta"}
    last = events[-1]
    assert (last["type"], last["completed"]) == ("final", True)
    assert events[0]["bbox"] == last["bbox"]
    assert "".join(event["chunk"] for event in events[1:-1]) == last["path"]


def test_points_and_boxes_stream_one_by_one(client: httpx.Client) -> None:
    *points, last = events_in(read_stream(client, "point", image_url=SCENE_URL, object="bee"))
    assert [event["point"] for event in points] == last["points"]
    *boxes, last = events_in(read_stream(client, "detect", image_url=SCENE_URL, object="bee"))
    assert [event["object"] for event in boxes] == last["objects"]
    assert last["type"] == "final"


def test_pieces_arrive_while_the_answer_is_written(client: httpx.Client, server: RunningServer) -> None:
    """Nothing on the way buffers: the first pieces are there while the engine computes the last of many tokens."""
    body = long_query(end_id_of(server.engine), stream=True, request_id="in-pieces")
    with client.stream("POST", "/v1/query", json=body) as response:
        pieces = response.iter_raw()
        assert all(next(pieces) for _ in range(5))
        assert "in-pieces" in server.engine.taken_ids
    assert eventually(lambda: "in-pieces" not in server.engine.taken_ids)


def test_a_wrong_field_is_a_status_and_no_stream(client: httpx.Client) -> None:
    response = client.post("/v1/query", json={"question": "What?", "stream": True, "temperature": -1})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "temperature"


def test_a_prompt_that_never_fits_is_a_status_and_no_stream(client: httpx.Client, server: RunningServer) -> None:
    length = server.engine.max_model_length
    response = client.post("/v1/query", json={"question": "bee " * length, "stream": True})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert f"This model's maximum context length is {length} tokens" in error["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request_and_frees_its_pages(server: RunningServer, stream: bool) -> None:
    name = f"left-{stream}"
    body = long_query(end_id_of(server.engine), stream=stream, request_id=name)
    connection = send(server.url, body)
    assert eventually(lambda: server.engine.num_requests == 1 and server.engine.has_begun(name))
    if stream:
        assert connection.getresponse().status == 200
    connection.close()
    assert eventually(lambda: server.engine.num_requests == 0)
    assert eventually(lambda: name in server.watcher.outcomes)
    assert isinstance(server.watcher.outcomes[name], BaseException)
    cache = server.engine._cache
    assert eventually(lambda: cache.num_leases == 0)


def num_failed(server: RunningServer) -> float:
    with server.client() as client:
        page = Page(client.get("/metrics").text)
    return page.total("kestrel_http_requests_total", route="/v1/query", status="500")


def test_a_failure_in_the_middle_is_an_error_event_and_the_end(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The request fails on the engine's side after its first piece. Log and counts do not call it well."""
    caplog.set_level(logging.INFO, "kestrel.server.access")
    num_failed_before = num_failed(server)
    name = "fails"
    body = long_query(end_id_of(server.engine), stream=True, request_id=name)
    with server.client() as client, client.stream("POST", "/v1/query", json=body) as response:
        pieces = response.iter_raw()
        data = next(pieces)

        async def fail() -> None:
            server.engine._streams[name].fail(NumericalError("secret numbers at /home/model"))

        server.on_loop(fail)
        data += b"".join(pieces)
    *_, last = events_in(data)
    assert last == {
        "error": {
            "message": "the model's numbers for this request are not finite",
            "type": "server_error",
            "param": None,
            "code": "numerical_error",
        }
    }
    assert eventually(lambda: any(record.name == "kestrel.server.access" for record in caplog.records))
    line = json.loads(JsonLines().format(caplog.records[-1]))
    assert (line["level"], line["status"], line["error"]) == ("error", 500, "NumericalError")
    assert num_failed(server) == num_failed_before + 1

    async def cancel() -> None:
        server.engine._worker.try_send(Cancel(name))

    server.on_loop(cancel)


@pytest.fixture(scope="module")
def hasty() -> Iterator[RunningServer]:
    """A server with short times."""
    config = ServerConfig(port=0, ping_interval_s=0.05, request_timeout_s=1.0, queue_timeout_s=0.4)
    yield from start_server(config, runtime_config(max_batch_size=1))


def test_comments_keep_a_silent_stream_open(hasty: RunningServer) -> None:
    """Behind another request there is nothing to say, until the wait is too long."""
    first = send(hasty.url, long_query(end_id_of(hasty.engine), request_id="in front"))
    assert eventually(lambda: "in front" in hasty.state.running and hasty.engine.has_begun("in front"))
    with hasty.client() as client:
        data = read_stream(client, "query", question="Who are you?", settings={"max_tokens": 1})
    first.close()
    *pings, last = data.split(b"\n\n")[:-1]
    assert pings
    assert set(pings) == {b": ping"}
    assert json.loads(last[6:])["error"]["code"] == "queue_timeout"
    assert eventually(lambda: hasty.engine.num_requests == 0)


def test_a_request_past_its_deadline_is_ended_with_408_or_an_event(hasty: RunningServer) -> None:
    body = long_query(end_id_of(hasty.engine))
    with hasty.client() as client:
        response = client.post("/v1/query", json=body)
        assert response.status_code == 408
        assert response.json()["error"]["code"] == "deadline_exceeded"
        frames = read_stream(client, "query", **body).split(b"\n\n")[:-1]
    assert json.loads(frames[-1][6:])["error"]["code"] == "deadline_exceeded"
    assert eventually(lambda: hasty.engine.num_requests == 0)


def test_a_request_that_waits_too_long_is_refused_with_503(hasty: RunningServer) -> None:
    first = send(hasty.url, long_query(end_id_of(hasty.engine), request_id="holds"))
    assert eventually(lambda: hasty.engine.has_begun("holds") and "holds" in hasty.state.running)
    with hasty.client() as client:
        response = client.post("/v1/query", json={"question": "Who are you?", "max_tokens": 1})
    first.close()
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "queue_timeout"
    assert response.headers["retry-after"] == "1"
    assert eventually(lambda: hasty.engine.num_requests == 0)
    assert isinstance(hasty.watcher.outcomes["holds"], BaseException)
