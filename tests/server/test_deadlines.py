"""One deadline for the whole of a request, and what holds while its pictures and its adapter are fetched."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from kestrel.errors import QueueTimeout
from kestrel.server.config import ServerConfig
from kestrel.server.host import ServerHost
from kestrel.server.request_images import RemoteImages
from kestrel.server.state import app_state
from tests.server.conftest import SCENE_BYTES, RunningServer, runtime_config, start_server
from tests.server.leftovers import holdings
from tests.server.long_request import end_id_of, long_query
from tests.server.sockets import eventually, send

QUEUE_S, REQUEST_S = 0.6, 2.0
SOON_S = 15.0
"""Far above the deadlines here, far below the time that the hosts take."""
MAX_IMAGE_BYTES = 400_000
MAX_PENDING_BYTES = 600_000
MAX_FETCHES = 2


@dataclass
class SilentHost:
    """Takes connections and reads them. What it says to each is all that it ever says."""

    port: int
    says: bytes = b""
    connections: list[socket.socket] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://pictures.test:{self.port}/a.png"


@contextmanager
def silent_host() -> Iterator[SilentHost]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        host = SilentHost(listening.getsockname()[1])

        def take() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                host.connections.append(connection)
                connection.sendall(host.says)

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        try:
            yield host
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(5)
            for connection in host.connections:
                connection.close()


@pytest.fixture(scope="module")
def silent() -> Iterator[SilentHost]:
    with silent_host() as host:
        yield host


@pytest.fixture(scope="module")
def hasty(silent: SilentHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Short times, and hosts of pictures and adapters that never answer."""
    times = {"queue_timeout_s": QUEUE_S, "request_timeout_s": REQUEST_S, "max_pending_body_bytes": MAX_PENDING_BYTES}
    config = ServerConfig(
        port=0, max_image_fetches=MAX_FETCHES, allowed_image_hosts=(f"pictures.test:{silent.port}",), **times
    )
    adapters = {
        "adapter_url_template": f"http://127.0.0.1:{silent.port}/{{id}}",
        "adapter_cache_dir": tmp_path_factory.mktemp("adapters"),
    }
    engine = runtime_config(max_batch_size=2, max_queue_size=2, max_image_bytes=MAX_IMAGE_BYTES, **adapters)

    def reach_this_machine(app: FastAPI) -> None:
        async def resolve(name: str, port: int) -> list[str]:
            return ["127.0.0.1"]

        hosts, fetches = config.allowed_image_hosts, config.max_image_fetches
        app_state(app).images = RemoteImages(
            hosts, max_fetches=fetches, timeout_s=60.0, resolve=resolve, may_connect=lambda address: True
        )

    yield from start_server(config, engine, reach_this_machine)


@pytest.fixture(autouse=True)
def _nothing_is_left(hasty: RunningServer, silent: SilentHost) -> Iterator[None]:
    before = holdings(hasty)
    yield
    silent.says = b""
    assert eventually(lambda: holdings(hasty) == before)
    assert hasty.state.accepted == set()
    assert hasty.state.num_fetching == 0


@contextmanager
def patient(server: RunningServer, queue_s: float = 60.0, request_s: float = 60.0) -> Iterator[None]:
    """Requests that come in the meantime have more time."""
    config = server.state.config
    server.state.config = replace(config, queue_timeout_s=queue_s, request_timeout_s=request_s)
    try:
        yield
    finally:
        server.state.config = config


def ask(server: RunningServer, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=SOON_S)


def bodies_with_a_picture(url: str) -> dict[str, tuple[str, dict[str, Any]]]:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    chat = {"messages": [{"role": "user", "content": parts}]}
    return {
        "query": ("/v1/query", {"question": "What is this?", "image_url": url}),
        "query, streamed": ("/v1/query", {"question": "What is this?", "image_url": url, "stream": True}),
        "chat": ("/v1/chat/completions", chat),
        "chat, streamed": ("/v1/chat/completions", {**chat, "stream": True}),
        "embedding": ("/v1/embeddings", {"input": parts}),
    }


# ---------------------------------------------------------------------- deadlines


@pytest.mark.parametrize("kind", list(bodies_with_a_picture("")))
def test_the_wait_for_a_picture_is_part_of_the_deadline(hasty: RunningServer, silent: SilentHost, kind: str) -> None:
    response = ask(hasty, *bodies_with_a_picture(silent.url)[kind])
    assert (response.status_code, response.json()["error"]["code"]) == (503, "queue_timeout")
    assert "queue_timeout_s" in response.json()["error"]["message"]


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"n": 3}], ids=["whole", "streamed", "choices"])
def test_the_wait_for_an_adapter_is_part_of_the_deadline(hasty: RunningServer, more: dict[str, Any]) -> None:
    """Beside a choice that waits for the adapter others may wait in line: they end with it."""
    body = {"messages": [{"role": "user", "content": "Who are you?"}], "adapter": "slow", **more}
    response = ask(hasty, "/v1/chat/completions", body)
    error = response.json() if response.status_code != 200 else json.loads(response.text.split("\n\n")[0][6:])
    assert error["error"]["code"] == "queue_timeout"


def test_the_other_protocol_has_the_same_deadline(hasty: RunningServer) -> None:
    async def ask_there() -> None:
        with ServerHost(hasty.state, "gRPC").admit([], "somebody").request("/there", 10) as request:
            async with request.run("query", {"question": "Who are you?", "adapter": "slow"}, stream=False) as stream:
                await stream.result()

    with pytest.raises(QueueTimeout):
        hasty.on_loop(ask_there)


def test_many_prompts_of_a_request_share_one_deadline(hasty: RunningServer) -> None:
    """Each takes a fraction of it, all take a multiple. `queue_timeout_s` holds until the first of them has begun."""
    scheduler = hasty.engine._scheduler
    step = scheduler.step
    with patient(hasty, 0.7 * REQUEST_S, REQUEST_S), pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "step", lambda: (time.sleep(0.01), step())[1])
        prompts = {"prompt": ["Who are you?"] * 200, "max_tokens": 4, "ignore_eos": True}
        response = ask(hasty, "/v1/completions", prompts)
    assert (response.status_code, response.json()["error"]["code"]) == (408, "deadline_exceeded")


def test_a_client_is_told_at_its_deadline_although_no_step_ends(hasty: RunningServer) -> None:
    may_go_on = threading.Event()
    scheduler = hasty.engine._scheduler
    with pytest.MonkeyPatch.context() as patch:
        step = scheduler.step
        patch.setattr(scheduler, "step", lambda: (may_go_on.wait(60), step())[1])
        try:
            name = {"question": "Who are you?", "request_id": "hung"}
            first = ask(hasty, "/v1/query", name)
            assert (first.status_code, first.json()["error"]["code"]) == (503, "queue_timeout")
            again = ask(hasty, "/v1/query", name)
            assert again.status_code == 400, "its id stays its own until the step has ended"
            assert hasty.engine.num_requests == 1
        finally:
            may_go_on.set()
    assert eventually(lambda: hasty.engine.num_requests == 0)


# ---------------------------------------------------------------------- pictures that are fetched


def test_fetched_bytes_count_as_those_of_the_body_until_the_answer(hasty: RunningServer, silent: SilentHost) -> None:
    silent.says = b"HTTP/1.1 200 OK\r\ncontent-length: 350000\r\n\r\n" + bytes(300_000)
    body = {"question": "What is this?", "image_url": silent.url}
    with closing(send(hasty.url, body)) as first:
        assert eventually(lambda: hasty.state.pending_body_bytes > 300_000, QUEUE_S + SOON_S)
        with closing(send(hasty.url, body)) as second:
            refused = [connection.getresponse() for connection in (first, second)]
            errors = [json.load(response)["error"] for response in refused]
    assert [response.status for response in refused] == [503, 503]
    assert "overloaded" in {error["code"] for error in errors}, "two of them are more than max_pending_body_bytes"
    assert any("max_pending_body_bytes" in error["message"] for error in errors)


def test_a_picture_is_fetched_up_to_the_size_that_is_read(hasty: RunningServer, silent: SilentHost) -> None:
    silent.says = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (MAX_IMAGE_BYTES + 1)
    error = ask(hasty, "/v1/query", {"question": "What is this?", "image_url": silent.url}).json()["error"]
    assert (error["param"], "max_image_bytes" in error["message"]) == ("image_url", True)


def test_a_picture_that_arrives_is_answered(hasty: RunningServer, silent: SilentHost) -> None:
    silent.says = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(SCENE_BYTES) + SCENE_BYTES
    body = {"object": "cow", "image_url": silent.url, "settings": {"max_objects": 1}}
    with patient(hasty):
        assert ask(hasty, "/v1/point", body).status_code == 200


def test_only_so_many_pictures_are_fetched_at_once(hasty: RunningServer, silent: SilentHost) -> None:
    """The next one begins when one of them ends, as it does when its client leaves."""
    num_before = len(silent.connections)
    body = {"question": "What is this?", "image_url": silent.url}
    with patient(hasty):
        waiting = [send(hasty.url, body) for _ in range(MAX_FETCHES + 2)]
        assert eventually(lambda: hasty.state.num_fetching == len(waiting))
        assert eventually(lambda: len(silent.connections) == num_before + MAX_FETCHES)
        time.sleep(0.2)
        assert len(silent.connections) == num_before + MAX_FETCHES
        waiting[0].close()
        assert eventually(lambda: len(silent.connections) == num_before + MAX_FETCHES + 1)
        for connection in waiting[1:]:
            connection.close()
        assert eventually(lambda: hasty.state.num_fetching == 0)


def test_nothing_is_fetched_for_a_request_that_finds_the_queue_full(hasty: RunningServer, silent: SilentHost) -> None:
    num_before = len(silent.connections)
    with patient(hasty):
        crowd = [send(hasty.url, long_query(end_id_of(hasty.engine))) for _ in range(4)]
        assert eventually(lambda: hasty.engine.num_requests == 4)
        refused = ask(hasty, "/v1/query", {"question": "What is this?", "image_url": silent.url})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
    assert "max_queue_size" in refused.json()["error"]["message"]
    assert len(silent.connections) == num_before
    for connection in crowd:
        connection.close()
