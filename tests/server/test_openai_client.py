"""The openai package, unmodified, against this server: the current one, and 1.x from a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kestrel import default_model
from kestrel.server.config import ServerConfig
from kestrel.server.state import Phase
from tests.scene import SCENE
from tests.server.conftest import KEYS, SCENE_URL, RunningServer, runtime_config, start_server
from tests.server.pages import Page
from tests.server.sockets import eventually

ROOT = Path(__file__).parents[2]
SESSION = Path(__file__).with_name("openai_session.py")
OLD = ROOT / "out" / "clients" / "openai-1"
HINT = "run scripts/install-clients"
CHAT = "/v1/chat/completions"

VERSIONS = [
    pytest.param(
        None, id="current", marks=pytest.mark.skipif(find_spec("openai") is None, reason="openai is not installed")
    ),
    pytest.param(
        OLD,
        id="1.x",
        marks=[
            pytest.mark.exhaustive,
            pytest.mark.skipif(not OLD.is_dir(), reason=f"openai 1.x is not installed; {HINT}"),
        ],
    ),
]


@contextmanager
def session(folder: Path | None, task: str, url: str) -> Iterator[subprocess.Popen[str]]:
    """The client in a process of its own, so that its version cannot meet ours."""
    environment = {**os.environ, "PYTHONPATH": "" if folder is None else str(folder)}
    with subprocess.Popen(
        [sys.executable, str(SESSION), task],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps({"url": url, "key": KEYS[0], "image_url": SCENE_URL}) + "\n")
        process.stdin.flush()
        yield process
        assert process.wait(60) == 0


def last_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    return json.loads(process.stdout.read().splitlines()[-1])


@pytest.fixture(scope="module", params=VERSIONS)
def seen(locked: RunningServer, request: pytest.FixtureRequest) -> dict[str, Any]:
    """What one version of the client saw on its tour."""
    with session(request.param, "tour", locked.url) as process:
        seen = last_line(process)
    assert seen["version"].startswith("1.") == (request.param is not None)
    return seen


def test_the_client_gets_what_the_engine_says(locked: RunningServer, seen: dict[str, Any]) -> None:
    assert seen["model"] == "kestrel-tiny"
    assert seen["warnings"] == [[default_model.NOTICE]] * 2, "of a stream the first chunk has it"
    engine = locked.engine
    counted = locked.on_loop(lambda: engine.query(SCENE, "How many bees are there?", reasoning=False, temperature=0.0))
    assert seen["answer"] == counted.text == "3"
    assert seen["top"] == [2] * counted.metrics.output_tokens
    assert seen["image_tokens"] == engine.num_image_positions
    who = locked.on_loop(lambda: engine.query(question="Who are you?", reasoning=False, temperature=0.0))
    assert seen["stream"] == {
        "text": who.text,
        "role": "assistant",
        "reason": "stop",
        "num_chunks": seen["stream"]["num_chunks"],
        "completion_tokens": who.metrics.output_tokens,
    }
    assert seen["stream"]["num_chunks"] > 4
    assert seen["prompt"].startswith("Who are you?")
    assert seen["first_logprob"] is None
    assert seen["num_logprobs"] >= len(engine.profile.tokenizer.encode("Who are you?")) + 2
    for one, other, text in zip(seen["floats"], seen["packed"], ("a bee", "a star"), strict=True):
        truth = locked.on_loop(lambda text=text: engine.embed(text=text)).output["embedding"]
        assert one == pytest.approx(truth, abs=1e-5)
        assert other == pytest.approx(truth, abs=1e-5)


def test_refusals_are_the_clients_own_errors(seen: dict[str, Any]) -> None:
    assert {name: (error["class"], error["code"], error["param"]) for name, error in seen["errors"].items()} == {
        "key": ("AuthenticationError", "invalid_api_key", None),
        "model": ("NotFoundError", "model_not_found", None),
        "retrieve": ("NotFoundError", "model_not_found", None),
        "field": ("BadRequestError", None, "temperature"),
        "length": ("BadRequestError", "context_length_exceeded", "messages"),
    }


@pytest.fixture(scope="module")
def narrow() -> Iterator[RunningServer]:
    """A server where a client may have one request at a time."""
    config = ServerConfig(port=0, api_keys=KEYS, max_requests_per_client=1)
    yield from start_server(config, runtime_config())


@contextmanager
def unfinished_request(server: RunningServer) -> Iterator[None]:
    """A request whose body has not arrived yet takes the client's only place."""
    connection = HTTPConnection(server.url.removeprefix("http://"))
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("authorization", f"Bearer {KEYS[0]}")
    connection.putheader("content-length", "100")
    connection.endheaders()
    yield
    connection.close()


@contextmanager
def draining(server: RunningServer) -> Iterator[None]:
    server.state.phase = Phase.DRAINING
    yield
    server.state.phase = Phase.READY


def num_refused(server: RunningServer) -> float:
    with server.client(headers={"authorization": f"Bearer {KEYS[1]}"}) as client:
        page = Page(client.get("/metrics").text)
    return sum(page.total("kestrel_http_requests_total", route=CHAT, status=status) for status in ("429", "503"))


@pytest.mark.parametrize("folder", VERSIONS)
@pytest.mark.parametrize(
    ("trouble", "error"),
    [
        (unfinished_request, ("RateLimitError", "rate_limit_exceeded")),
        (draining, ("InternalServerError", "not_serving")),
    ],
)
def test_the_client_retries_as_it_is_told(
    narrow: RunningServer, folder: Path | None, trouble: Any, error: tuple[str, str]
) -> None:
    before = num_refused(narrow)
    with ExitStack() as troubled:
        troubled.enter_context(trouble(narrow))
        with session(folder, "patience", narrow.url) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "refused\n"
            assert eventually(lambda: num_refused(narrow) == before + 2), "the next attempt is refused too"
            troubled.close()
            seen = last_line(process)
    assert (seen["refused"]["class"], seen["refused"]["code"]) == error
    assert seen["refused"]["retry_after"] == "1"
    assert seen["answer"]
    assert seen["seconds"] > 0.95  # it waited for as long as Retry-After says
