"""Packages over the OpenAI API, unmodified: instructor, outlines, pydantic-ai, LlamaIndex and the AI SDK for Node;
and scripts for the chat of the hosted Moondream.

Each runs as a script in a process of its own, with the packages that scripts/install-clients has put into its folder.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import openai
import pytest

from kestrel.constraints import ResponseFormat, response_format
from kestrel.server.config import ServerConfig
from kestrel.skills.base import ToolForm
from kestrel.skills.tools import ToolUse
from tests.llama.chat_shapes import HERMES
from tests.scene import SCENE
from tests.server.conftest import KEYS, SCENE_URL, RunningServer, runtime_config, start_server
from tests.server.test_tools import make_folder

SESSIONS = Path(__file__).with_name("client_sessions")
CLIENTS = Path(__file__).parents[2] / "out" / "clients"
APIS = ("chat", "responses")


@pytest.fixture(scope="module")
def texts(_one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = make_folder(tmp_path_factory.mktemp("clients") / "tiny-llama", HERMES)
    yield from start_server(ServerConfig(port=0), runtime_config(model_path=folder))


def seen_by(client: str, *more: str, server: RunningServer, texts: RunningServer | None = None) -> dict[str, Any]:
    """What the session with a Python client prints."""
    folder = CLIENTS / client
    if not folder.is_dir():
        pytest.skip(f"{client} is not installed; run scripts/install-clients")
    command = [sys.executable, str(SESSIONS / f"with_{client.replace('-', '_')}.py"), *more]
    return told_by(command, server, texts, {**os.environ, "PYTHONPATH": str(folder)})


def told_by(
    command: list[str], server: RunningServer, texts: RunningServer | None, environment: dict[str, str]
) -> dict[str, Any]:
    given = json.dumps({"pictures": server.url, "texts": texts and texts.url, "image": str(SCENE)})
    told = subprocess.run(command, input=given, env=environment, capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stderr[-4000:]
    return json.loads(told.stdout)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@contextmanager
def saying(*answers: str) -> Iterator[None]:
    """The text model's answers to requests with tools are these, one after the other, and all are asked for."""
    left = [response_format("said", {"type": "choice", "choices": [answer]}) for answer in answers]
    usual = ToolUse.format

    def said(use: ToolUse, form: ToolForm, *more: Any) -> ResponseFormat | None:
        return left.pop(0) if form.name == "hermes" else usual(use, form, *more)

    with patch.object(ToolUse, "format", said):
        yield
    assert left == []


AGAIN = {"TOOLS again": 2, "RESPONSES_TOOLS again": 2}


def test_instructor_gets_objects_by_a_format_and_by_a_forced_tool(server: RunningServer) -> None:
    seen = seen_by("instructor", server=server)
    assert seen == {"JSON_SCHEMA": 2, "TOOLS": 2, "RESPONSES_TOOLS": 2, "in parts": [None, 2], **AGAIN}


def test_outlines_gets_what_its_types_say(server: RunningServer) -> None:
    seen = seen_by("outlines", server=server)
    assert json.loads(seen.pop("schema")) == {"count": 2}
    assert seen.pop("regex").isalpha()
    assert seen.pop("chat")[0].isdigit()
    assert seen == {"choice": "two", "none": "3", "stream": "two"}


WEATHER = call("get_weather", city="Rome")
PLACE = {"city": "Rome", "is_warm": True}


@pytest.mark.parametrize("api", ["chat", pytest.param("responses", marks=pytest.mark.exhaustive)])
def test_agents_of_pydantic_ai_call_tools_and_give_structured_output(
    api: str, server: RunningServer, texts: RunningServer
) -> None:
    outputs = call("final_result", **PLACE), json.dumps(PLACE), "Yes."
    with saying(*(answer for output in outputs for answer in (WEATHER, output))):
        seen = seen_by("pydantic-ai", api, server=server, texts=texts)
    assert "".join(seen.pop("pieces")).startswith("I am a small demonstration model")
    assert seen.pop("called") == ["Rome", PLACE, "Rome", PLACE, "Rome", "Yes."]
    assert seen == {"text": "3", "by tool": 2, "by format": 2}


@pytest.mark.exhaustive
def test_llama_index_chats_about_pictures_streams_and_calls_tools(server: RunningServer, texts: RunningServer) -> None:
    with saying(WEATHER):
        seen = seen_by("llama-index", server=server, texts=texts)
    assert "".join(seen.pop("pieces")).startswith("I am a small demonstration model")
    calls = [["get_weather", {"city": "Rome"}]]
    assert seen == {"chat": "3", "stream": "3", "by tool": 2, "by format": 2, "calls": calls}


def test_the_ai_sdk_generates_text_and_objects_streams_and_loops(
    server: RunningServer, texts: RunningServer, tmp_path: Path
) -> None:
    node, packages = shutil.which("node"), CLIENTS / "node" / "node_modules"
    if node is None or not (packages / "ai").is_dir():
        pytest.skip("no AI SDK for Node; run scripts/install-clients where npm is")
    script = shutil.copy(SESSIONS / "with_ai_sdk.mjs", tmp_path)
    (tmp_path / "node_modules").symlink_to(packages)
    with saying(*(answer for _ in APIS for answer in (WEATHER, '{"count": 7}'))):
        seen = told_by([node, script], server, texts, {**os.environ})
    assert list(seen["pictures"]) == list(seen["tools"]) == list(APIS)
    for one in seen["pictures"].values():
        assert "".join(one.pop("pieces")).startswith("I am a small demonstration model")
        assert one.pop("num_tokens") > 9
        assert one == {"text": "3", "object": {"count": 2}, "output": {"count": 2}, "reason": "stop"}
    for called in seen["tools"].values():
        assert called == ["18 degrees in Rome", {"count": 7}]


@pytest.mark.exhaustive
def test_a_script_for_the_chat_of_the_hosted_service_needs_another_address_only() -> None:
    names = ("moondream/moondream3-preview", "moondream3-preview")
    picture = {"type": "image_url", "image_url": {"url": SCENE_URL}}
    asked: Any = [{"role": "user", "content": [picture, {"type": "text", "text": "How many bees are there?"}]}]
    more = [{"role": "assistant", "content": "3"}, {"role": "user", "content": "Is there a dog?"}]
    config = ServerConfig(port=0, api_keys=KEYS, served_model_names=names)
    for hosted in start_server(config, runtime_config()):
        with openai.OpenAI(base_url=f"{hosted.url}/v1", api_key=KEYS[0], timeout=60) as client:
            for name in names:
                how: Any = {"model": name, "temperature": 0}
                whole = client.chat.completions.create(messages=asked, reasoning_effort="medium", **how)
                assert (whole.model, whole.choices[0].message.content) == (names[0], "3")
                assert "bee" in whole.choices[0].message.model_dump()["reasoning_content"]
                chunks = client.chat.completions.create(messages=[*asked, *more], stream=True, **how)
                assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "no"
