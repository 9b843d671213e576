"""sglang-router in front of two servers, unmodified: `scripts/install-clients` puts it into a folder of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from tests.server.conftest import GREEDY, KEYS, SCENE_URL
from tests.server.long_request import TOKENS as LONG
from tests.server.programs import Program
from tests.server.sockets import eventually

pytestmark = pytest.mark.exhaustive

FOLDER = Path(__file__).parents[2] / "out" / "clients" / "sglang-router"
MODEL = "kestrel-tiny"
KEY = KEYS[0]
CHAT = "/v1/chat/completions"


@dataclass
class Fleet:
    url: str
    workers: list[Program]
    client: openai.OpenAI

    def num_chats(self) -> list[int]:
        return [worker.log.count(CHAT) for worker in self.workers]

    def healthy(self) -> list[str]:
        told = httpx.get(f"{self.url}/workers", headers={"authorization": f"Bearer {KEY}"}, timeout=60)
        return [worker["url"] for worker in told.json()["workers"] if worker["is_healthy"]] if told.is_success else []


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    if not FOLDER.is_dir():
        pytest.skip("sglang-router is not installed; run scripts/install-clients")
    folder = tmp_path_factory.mktemp("fleet")
    workers = [Program(folder / f"worker-{number}.log", "--api-key", KEY) for number in range(2)]
    log = folder / "router.log"
    try:
        router, url = started_router([worker.url() for worker in workers], log)
        try:
            with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
                running = Fleet(url, workers, client)
                eventually(lambda: router.poll() is not None or is_up(running))
                assert router.poll() is None, log.read_text(encoding="utf-8")
                yield running
        finally:
            router.kill()
            router.wait()
    finally:
        for worker in workers:
            worker.kill()


def started_router(workers: list[str], log: Path) -> tuple[subprocess.Popen[bytes], str]:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        port, metrics_port = (str(taken.getsockname()[1]) for taken in (first, second))
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", port]
    command += ["--prometheus-port", metrics_port, "--worker-urls", *workers, "--policy", "cache_aware"]
    command += ["--cb-failure-threshold", "3", "--health-check-interval-secs", "1", "--api-key", KEY]
    with log.open("wb") as file:
        environment = {**os.environ, "PYTHONPATH": str(FOLDER)}
        router = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
    return router, f"http://127.0.0.1:{port}"


def is_up(fleet: Fleet) -> bool:
    try:
        return len(fleet.healthy()) == 2
    except httpx.TransportError:
        return False


def ask(client: openai.OpenAI, question: str) -> str:
    message = {"role": "user", "content": question}
    chat = client.chat.completions.create(model=MODEL, messages=[message], max_tokens=8, **GREEDY)  # type: ignore[list-item]
    return chat.choices[0].message.content or ""


def test_the_router_learns_the_models_name(fleet: Fleet) -> None:
    assert [model.id for model in fleet.client.models.list()] == [MODEL]


def test_a_chat_about_a_picture_is_the_same_streamed_and_behind_the_router(fleet: Fleet) -> None:
    parts = [
        {"type": "text", "text": "What is in the picture?"},
        {"type": "image_url", "image_url": {"url": SCENE_URL}},
    ]
    request = {"model": MODEL, "messages": [{"role": "user", "content": parts}], "max_tokens": 12, **GREEDY}
    with openai.OpenAI(base_url=f"{fleet.workers[0].url()}/v1", api_key=KEY) as direct:
        expected = direct.chat.completions.create(**request).choices[0].message.content
    answer = fleet.client.chat.completions.create(**request).choices[0].message.content
    chunks = list(fleet.client.chat.completions.create(**request, stream=True))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert answer == streamed == expected
    assert len(chunks) > 2
    assert eventually(lambda: sum(fleet.num_chats()) == 3)  # records are written when answers are out


def test_a_busy_server_is_spared_and_a_known_beginning_goes_where_it_was(fleet: Fleet) -> None:
    beginning, before = "Some words that are always the same come first. " * 8, fleet.num_chats()
    messages = [{"role": "user", "content": "Say a lot."}]
    busy = {"max_tokens": LONG, "extra_body": {"ignore_eos": True}, **GREEDY}
    with fleet.client.chat.completions.create(model=MODEL, messages=messages, stream=True, **busy) as stream:  # type: ignore[call-overload]
        next(iter(stream))
        ask(fleet.client, f"{beginning}0?")
        assert eventually(lambda: fleet.num_chats() != before)
        (chosen,) = [place for place in (0, 1) if fleet.num_chats()[place] > before[place]]
    for number in range(1, 4):
        ask(fleet.client, f"{beginning}{number}?")
    assert eventually(lambda: sum(fleet.num_chats()) == sum(before) + 5)
    assert fleet.num_chats()[chosen] - before[chosen] == 4


def test_a_wrong_key_is_refused(fleet: Fleet) -> None:
    with pytest.raises(openai.AuthenticationError):
        ask(fleet.client.with_options(api_key="wrong"), "Hello")


def test_the_others_answer_when_a_server_is_killed(fleet: Fleet) -> None:
    """The last test: it leaves one server."""
    expected = ask(fleet.client, "What do you see?")
    assert expected
    killed = fleet.workers.pop(0)
    url = killed.url()
    killed.kill()
    for number in range(6):
        assert ask(fleet.client, "What do you see?") == expected, number
        ask(fleet.client, f"{number} other words, and more of them {number}")
    assert eventually(lambda: url not in fleet.healthy() and len(fleet.healthy()) == 1)
