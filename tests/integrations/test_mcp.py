"""`kestrel mcp` as assistants use it: the protocol's own client and a process with the embedded model."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from kestrel import __version__, default_model
from kestrel.cli.app import run
from tests.processes import eventually
from tests.scene import BEES, SCENE

pytest.importorskip("mcp.server.mcpserver", reason="the package mcp is not installed")

from anyio.from_thread import BlockingPortal, start_blocking_portal
from mcp import Client, StdioServerParameters

COMMAND = ("-m", "kestrel", "mcp")


class Assistant:
    def __init__(self, portal: BlockingPortal, client: Client, folder: Path, strays: list[object]) -> None:
        self._portal, self._client = portal, client
        self.folder, self.strays = folder, strays

    def tools(self) -> dict[str, Any]:
        return {tool.name: tool for tool in self._portal.call(self._client.list_tools).tools}

    @property
    def server_version(self) -> str:
        told = self._client.server_info
        assert told is not None
        return told.version

    def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        result = self._portal.call(self._client.call_tool, tool, arguments)
        assert not result.is_error, result.content
        return result.structured_content

    def refusal(self, tool: str, **arguments: Any) -> str:
        result = self._portal.call(self._client.call_tool, tool, arguments)
        assert result.is_error
        return result.content[0].text


@contextmanager
def connected(server: StdioServerParameters | str, folder: Path) -> Iterator[Assistant]:
    strays: list[object] = []

    async def keep(message: object) -> None:
        strays.append(message)

    asking = Client(server, message_handler=keep)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(asking) as client:
        yield Assistant(portal, client, folder, strays)


@pytest.fixture(scope="module")
def assistant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Assistant]:
    folder = tmp_path_factory.mktemp("mcp")
    (folder / "allowed").mkdir()
    (folder / "allowed" / "scene.png").write_bytes(SCENE.read_bytes())
    (folder / "allowed" / "notes.txt").write_text("no picture")
    (folder / "allowed" / "link.png").symlink_to(SCENE)
    (folder / "secret.png").write_bytes(SCENE.read_bytes())
    arguments = [*COMMAND, "--allow", str(folder / "allowed"), "--device", "cpu"]
    server = StdioServerParameters(command=sys.executable, args=arguments, env=dict(os.environ))
    with connected(server, folder) as assistant:
        yield assistant


def test_the_tools_are_listed_with_their_arguments(assistant: Assistant) -> None:
    tools = assistant.tools()
    assert list(tools) == ["look", "describe", "find", "count", "read_text"]
    assert tools["look"].input_schema["required"] == ["image", "question"]
    assert all(tool.description and tool.annotations.read_only_hint for tool in tools.values())
    assert not any(tool.input_schema["additionalProperties"] for tool in tools.values())


def test_things_are_found_with_scores_and_pixels(assistant: Assistant) -> None:
    found = assistant.call("find", image="scene.png", object="bee")
    assert len(found["objects"]) == len(BEES) == 3
    for box in found["objects"]:
        assert box["label"] == "bee"
        assert 0 < box["score"] <= 1
        assert box["pixels"]
    several = assistant.call("find", image="scene.png", object=["bee", "dragon"])["objects"]
    assert {box["label"] for box in several} >= {"bee"}


def test_things_are_counted(assistant: Assistant) -> None:
    found = assistant.call("count", image=str(assistant.folder / "allowed" / "scene.png"), object="bee")
    assert found["count"] == len(found["points"]) == 3
    assert set(found) == {"count", "points", "image", "finish_reason", "warnings"}
    assert found["warnings"] == [default_model.NOTICE]
    assert "--" not in default_model.NOTICE, "who reads it has no command line"


def test_questions_are_answered_in_words(assistant: Assistant) -> None:
    assert assistant.call("look", image="scene.png", question="How many bees are there?")["answer"] == "3"
    assert "bee" in assistant.call("describe", image="scene.png", length="short")["caption"]
    assert assistant.call("read_text", image="scene.png")["text"]


@pytest.mark.parametrize(
    "name", ["../secret.png", "link.png", "{folder}/secret.png", "{folder}", "/etc/none", "~/x.png"]
)
def test_paths_outside_the_allowed_folders_are_refused(assistant: Assistant, name: str) -> None:
    path = name.format(folder=assistant.folder)
    message = assistant.refusal("find", image=path, object="bee")
    assert path in message
    assert "--allow" in message


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("notes.txt", "image"),
        (".", "not a file"),
        ("none.png", "not a file"),
        ("a\0b", "not a path"),
        ("~nobody-here/a", "not a path"),
    ],
)
def test_what_is_no_picture_is_refused_and_the_server_goes_on(assistant: Assistant, name: str, reason: str) -> None:
    assert reason in assistant.refusal("describe", image=name)
    assert assistant.tools()


def test_web_addresses_are_refused_unless_allowed(assistant: Assistant) -> None:
    assert "--allow-urls" in assistant.refusal("describe", image="http://pictures.test/a.png")


@pytest.mark.parametrize(
    ("tool", "arguments", "told"),
    [
        ("describe", {"image": "scene.png", "colour": "red"}, "colour: is not known; the arguments are: image, length"),
        ("describe", {"image": "scene.png", "lenght": "short"}, "did you mean 'length'?"),
        ("describe", {"image": "scene.png", "length": "big"}, "length: must be one of: short, normal, long"),
        ("look", {"image": "scene.png"}, "question: is required (In plain words)"),
        ("find", {"image": "scene.png", "object": 5}, "object: must be a string or list of string"),
    ],
)
def test_wrong_arguments_are_told_by_their_names(
    assistant: Assistant, tool: str, arguments: dict[str, Any], told: str
) -> None:
    message = assistant.refusal(tool, **arguments)
    assert told in message
    assert "pydantic" not in message
    assert "validation error" not in message


def test_the_server_tells_its_version(assistant: Assistant) -> None:
    assert assistant.server_version == __version__


def test_nothing_but_the_protocol_is_on_stdout(assistant: Assistant) -> None:
    assert assistant.call("count", image="scene.png", object="bee")["count"] == 3
    assert assistant.strays == []


def test_ctrl_c_ends_a_server_that_waits_for_stdin() -> None:
    command = [sys.executable, *COMMAND]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n')
        assert process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == -signal.SIGINT


# ---------------------------------------------------------------------- over HTTP


@pytest.fixture(scope="module")
def listening() -> Iterator[SimpleNamespace]:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    arguments = (*COMMAND, "--http", str(port), "--allow-urls", "--endpoint", "http://127.0.0.1:1")
    process = subprocess.Popen([sys.executable, *arguments], cwd=SCENE.parent, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}/mcp"
        assert eventually(lambda: process.poll() is not None or answers(port))
        yield SimpleNamespace(url=url, port=port)
    finally:
        process.terminate()
        process.wait()


def answers(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


def test_tools_over_http_say_what_is_amiss(listening: SimpleNamespace) -> None:
    with connected(listening.url, SCENE.parent) as assistant:
        assert "find" in assistant.tools()
        assert "cannot be reached" in assistant.refusal("describe", image=SCENE.name)
        assert "not public" in assistant.refusal("describe", image="http://127.0.0.1/a.png")


@pytest.mark.parametrize("header", [{"host": "evil.test"}, {"origin": "http://evil.test"}])
def test_pages_of_other_hosts_are_refused(listening: SimpleNamespace, header: dict[str, str]) -> None:
    asked = {"accept": "application/json, text/event-stream", **header}
    body = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    assert httpx.post(listening.url, json=body, headers=asked).status_code in (403, 421)


def test_an_address_in_use_is_refused(listening: SimpleNamespace) -> None:
    command = [sys.executable, *COMMAND, "--http", str(listening.port)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "--http" in ended.stderr


# ---------------------------------------------------------------------- mistakes of whoever starts it


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--allow", "/no/such/folder"], "--allow"),
        (["--http", "here"], "--http"),
        (["--http", "0.0.0.0:8090"], "--http"),
        (["--api-key", "k"], "--endpoint"),
        (["--endpoint", "gpu-box"], "--endpoint"),
        (["--endpoint", "http://gpu-box", "--max-batch-size", "3"], "--max-batch-size"),
    ],
)
def test_mistakes_are_refused_at_the_start(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["mcp", *arguments]) == 2
    output = capsys.readouterr()
    assert words in output.err
    assert output.out == ""


def test_without_the_package_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    monkeypatch.delitem(sys.modules, "kestrel.mcp_server", raising=False)
    assert run(["mcp"]) == 1
    assert "pip install -e '.[mcp]'" in capsys.readouterr().err
