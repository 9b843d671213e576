"""Tools over the OpenAI API, with a small random Llama. A grammar makes it say what a test wants it to say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import jsonschema
import openai
import pytest
from tokenizers import AddedToken, Tokenizer

from kestrel.config import RuntimeConfig
from kestrel.constraints import response_format
from kestrel.errors import ConfigError
from kestrel.families import ready_model
from kestrel.server.config import ServerConfig
from kestrel.server.openai import chat as chat_route
from kestrel.skills.tools import MAX_TOOLS, ToolUse
from tests.constraints.json_walks import SCHEMAS, assert_valid
from tests.llama.chat_shapes import CHATML, HERMES
from tests.llama.tiny_folders import write_folder
from tests.server.conftest import RunningServer, runtime_config, start_server

MARKED = ("<|im_start|>", "<|im_end|>")
UNMARKED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
SHORT = {"max_tokens": 200, "temperature": 0}


def tool(name: str, schema: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, **({} if schema is None else {"parameters": schema}), **more},
    }


TOOLS = [tool("greet", SCHEMAS["person"], description="Greets."), tool("stop_all")]
CALL = '<tool_call>\n{"name": "greet", "arguments": {"name": "Ann", "age": 20}}\n</tool_call>'


def make_folder(folder: Path, template: str) -> Path:
    write_folder(folder, "llama", num_layers=1)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in MARKED])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in UNMARKED])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": template}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tools") / "tiny-llama", HERMES)


@pytest.fixture(scope="module")
def texts(_one_thread: None, folder: Path) -> Iterator[RunningServer]:
    yield from start_server(ServerConfig(port=0), runtime_config(model_path=folder))


@pytest.fixture
def client(texts: RunningServer) -> Iterator[httpx.Client]:
    with texts.client() as client:
        yield client


@pytest.fixture(scope="module")
def sdk(texts: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{texts.url}/v1", api_key="none")


@contextmanager
def saying(answer: str) -> Iterator[None]:
    """Answers to requests with tools are this text."""
    wanted = response_format("said", {"type": "choice", "choices": [answer]})
    with patch.object(ToolUse, "format", lambda *_: wanted):
        yield


def chat(client: httpx.Client, messages: list[Any] = HELLO, **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/chat/completions", json={"messages": messages, "tools": TOOLS, **SHORT, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def refusal(client: httpx.Client, messages: list[Any] = HELLO, **fields: Any) -> str:
    response = client.post("/v1/chat/completions", json={"messages": messages, **SHORT, **fields})
    assert response.status_code == 400, response.text
    return response.json()["error"]["param"]


def streamed(sdk: openai.OpenAI, **fields: Any) -> tuple[str, list[dict[str, Any]], str, int]:
    """Content, calls and finish reason as a client puts them together, and in how many pieces arguments came."""
    content, calls, reason, num_pieces = "", [], "", 0
    how: Any = {"messages": HELLO, "tools": TOOLS, **SHORT, **fields}
    for chunk in sdk.chat.completions.create(model="tiny-llama", stream=True, **how):
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for piece in choice.delta.tool_calls or ():
            assert piece.function is not None
            if piece.index == len(calls):
                assert (piece.type, bool(piece.id), bool(piece.function.name)) == ("function", True, True)
                calls.append({"name": piece.function.name, "arguments": ""})
            else:
                assert (piece.id, piece.function.name) == (None, None)
            calls[piece.index]["arguments"] += piece.function.arguments or ""
            num_pieces += bool(piece.function.arguments)
    return content, calls, reason, num_pieces


def test_a_loop_of_calls_and_results_as_the_sdk_runs_it(sdk: openai.OpenAI, texts: RunningServer) -> None:
    messages: list[Any] = [{"role": "system", "content": "Help."}, *HELLO]
    how: Any = {"model": "tiny-llama", "tools": TOOLS, **SHORT}
    first = sdk.chat.completions.create(messages=messages, tool_choice="required", parallel_tool_calls=False, **how)
    message = first.choices[0].message
    assert (first.choices[0].finish_reason, message.content) == ("tool_calls", None)
    assert message.tool_calls
    messages.append(message)
    for call in message.tool_calls:
        assert call.type == "function"
        assert_valid(call.function.arguments, SCHEMAS["person"] if call.function.name == "greet" else {})
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "<|im_end|> done"})
    second = sdk.chat.completions.create(messages=messages, tool_choice="none", **{**how, "max_tokens": 5})
    assert second.choices[0].message.tool_calls is None
    assert second.usage is not None
    assert first.usage is not None
    cached = second.usage.prompt_tokens_details
    assert cached is not None
    assert (cached.cached_tokens or 0) >= first.usage.prompt_tokens - 4, "the call goes on where the question ended"


def test_calls_are_streamed_as_they_are_written(sdk: openai.OpenAI, client: httpx.Client) -> None:
    with saying(f"I look.\n{CALL}\n{CALL.replace('Ann', 'Bob')}"):
        content, calls, reason, num_pieces = streamed(sdk)
        choice = chat(client)["choices"][0]
    assert (content, reason) == ("I look.", "tool_calls")
    names = ["Ann", "Bob"]
    assert calls == [{"name": "greet", "arguments": f'{{"name": "{name}", "age": 20}}'} for name in names]
    assert num_pieces > 10
    assert (choice["message"]["content"], choice["finish_reason"]) == (content, reason)
    assert [call["function"] for call in choice["message"]["tool_calls"]] == calls
    assert len({call["id"] for call in choice["message"]["tool_calls"]}) == 2


def test_without_parallel_calls_the_answer_ends_with_the_first(sdk: openai.OpenAI, client: httpx.Client) -> None:
    with saying(f"{CALL}\n{CALL}"):
        whole = chat(client, parallel_tool_calls=False)
        content, calls, reason, _ = streamed(sdk, parallel_tool_calls=False)
    assert len(whole["choices"][0]["message"]["tool_calls"]) == len(calls) == 1
    assert (content, reason) == ("", "tool_calls")


@pytest.mark.parametrize(
    "answer",
    [
        CALL.replace("greet", "fly"),
        '<tool_call>{"name": "greet"',
        CALL.replace("20", "x"),
        "Hello <tool_call> there.",
    ],
)
def test_what_is_no_call_is_content(client: httpx.Client, answer: str) -> None:
    with saying(answer):
        choice = chat(client)["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": answer, "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_a_call_that_a_limit_cuts_is_shown_as_far_as_it_came(sdk: openai.OpenAI, client: httpx.Client) -> None:
    with saying(CALL):
        choice = chat(client, max_tokens=50)["choices"][0]
        content, calls, reason, _ = streamed(sdk, max_tokens=50)
    (call,) = choice["message"]["tool_calls"]
    assert '{"name": "Ann", "age": 20}'.startswith(call["function"]["arguments"])
    assert (choice["finish_reason"], reason, content) == ("length", "length", "")
    assert calls == [call["function"]]


def test_stop_strings_end_text_and_not_calls(sdk: openai.OpenAI, client: httpx.Client) -> None:
    with saying(CALL):
        assert chat(client, stop=["Ann", "}"])["choices"][0]["finish_reason"] == "tool_calls"
    with saying(f"I look at Ann.\n{CALL}"):
        choice = chat(client, stop="Ann")["choices"][0]
        assert streamed(sdk, stop="Ann")[:3] == ("I look at ", [], "stop")
    assert (choice["message"]["content"], choice["finish_reason"]) == ("I look at ", "stop")


def test_log_probabilities_are_those_of_all_tokens(client: httpx.Client) -> None:
    with saying(f"Yes.{CALL}"):
        answer = chat(client, logprobs=True)
        body = {"messages": HELLO, "tools": TOOLS, "logprobs": True, "stream": True, **SHORT}
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    whole = answer["choices"][0]["logprobs"]["content"]
    assert len(whole) == answer["usage"]["completion_tokens"]
    parts = [line["choices"][0]["logprobs"] for line in lines]
    assert [token for part in parts if part is not None for token in part["content"]] == whole


async def test_required_and_named_calls_fit_their_schemas_whatever_the_weights_say(texts: RunningServer) -> None:
    objects = {f"tool-{at}": one for at, one in enumerate(SCHEMAS.values()) if one.get("type") == "object"}
    tools = [tool(name, schema) for name, schema in objects.items()]

    async def call(seed: int, choice: Any) -> None:
        how = {"temperature": 1.0, "seed": seed, "max_tokens": 400, "parallel_tool_calls": seed % 2 == 0}
        body = {"messages": HELLO, "tools": tools, "tool_choice": choice, **how}
        answer = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
        if answer["finish_reason"] == "length":
            return
        calls = answer["message"]["tool_calls"]
        assert len(calls) == 1 or choice == "required"
        for one in calls:
            assert_valid(one["function"]["arguments"], objects[one["function"]["name"]])
        ended.append(seed)

    ended: list[int] = []
    named = [{"type": "function", "function": {"name": name}} for name in objects]
    async with httpx.AsyncClient(base_url=texts.url, timeout=120) as client:
        await asyncio.gather(*(call(seed, choice) for seed, choice in enumerate(["required", "required", *named])))
    assert len(ended) > 2


def test_beside_a_format_an_answer_is_calls_or_fits_it(client: httpx.Client, texts: RunningServer) -> None:
    """A bias makes the model begin with the mark of a call, or not."""
    wanted = {"type": "json_schema", "json_schema": {"name": "found", "schema": SCHEMAS["person"]}}
    mark = texts.engine.profile.chat.tools.ids["<tool_call>"]  # pyright: ignore
    strict = [tool("greet", SCHEMAS["person"], strict=True)]
    for tools, choice, bias in ((strict, "auto", 100), (TOOLS, "required", 0), (TOOLS, "required", -100)):
        how = {"tools": tools, "tool_choice": choice, "response_format": wanted, "logit_bias": {str(mark): bias}}
        answer = chat(client, parallel_tool_calls=False, **how)["choices"][0]
        assert (answer["finish_reason"], answer["message"]["content"]) == ("tool_calls", None)
    for choice in ("auto", "none"):
        how = {"tool_choice": choice, "response_format": wanted, "logit_bias": {str(mark): -100}}
        answer = chat(client, **how)["choices"][0]
        assert answer["finish_reason"] == "stop"
        assert_valid(answer["message"]["content"], SCHEMAS["person"])


def test_tools_are_written_whether_or_not_they_may_be_called(client: httpx.Client) -> None:
    few = {"max_tokens": 1}
    prompts = {choice: chat(client, tool_choice=choice, **few)["usage"]["prompt_tokens"] for choice in ("auto", "none")}
    assert prompts["auto"] == prompts["none"] > chat(client, tools=[], **few)["usage"]["prompt_tokens"]
    with saying(CALL):
        assert "tool_calls" not in chat(client, tool_choice="none", **few)["choices"][0]["message"]


def test_the_answer_is_as_described(client: httpx.Client) -> None:
    described = client.get("/openapi.json").json()["paths"]["/v1/chat/completions"]["post"]
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": "required", **SHORT}
    jsonschema.validate(body, described["requestBody"]["content"]["application/json"]["schema"])
    answer = chat(client, tool_choice="required")
    jsonschema.validate(answer, described["responses"]["200"]["content"]["application/json"]["schema"])
    assert client.get("/tokenizer_info").json()["tool_parser"] == "hermes"


ASKED = {"role": "assistant", "content": None}


def called(**function: Any) -> list[Any]:
    return [*HELLO, {**ASKED, "tool_calls": [{"id": "a", "type": "function", "function": function}]}, *HELLO]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": 5}, "tools"),
        ({"tools": [tool("f")] * (MAX_TOOLS + 1)}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "code", "function": {"name": "f"}}]}, "tools[0]"),
        ({"tools": [tool("f g")]}, "tools[0].function.name"),
        ({"tools": [tool("f" * 65)]}, "tools[0].function.name"),
        ({"tools": [tool("f"), tool("f")]}, "tools[1].function.name"),
        ({"tools": [tool("f", description=5)]}, "tools[0].function.description"),
        ({"tools": [tool("f", strict=1)]}, "tools[0].function.strict"),
        ({"tools": [tool("f", colour=1)]}, "tools[0].function.colour"),
        ({"tools": [tool("f", {"type": "string"})]}, "tools[0].function.parameters"),
        ({"tools": [tool("f", {"x-guidance": {}})]}, "tools[0].function.parameters"),
        ({"tools": [tool("f", {"enum": ["a" * 70_000]})]}, "tools[0].function.parameters"),
        ({"tools": [tool("f", description="a" * 200_000)]}, "tools"),
        ({"tools": [tool("f", {"properties": {"a": {"multipleOf": 999983}}})], "tool_choice": "required"},
         "tools.f.parameters"),
        ({"tools": [tool("f", {"properties": {"a": {"type": "frog"}}})], "tool_choice": "required"}, "tools"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "fly"}}},
         "tool_choice.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tools": TOOLS, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "frog"}}}},
         "response_format"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"messages": called(name="f", arguments="{")}, "messages[1].tool_calls[0].function.arguments"),
        ({"messages": called(name="f", arguments="5")}, "messages[1].tool_calls[0].function.arguments"),
        ({"messages": called(name="f", arguments="[" * 20_000)}, "messages[1].tool_calls[0].function.arguments"),
        ({"messages": called(arguments="{}")}, "messages[1].tool_calls[0].function.name"),
        ({"messages": [*HELLO, {**ASKED, "tool_calls": [5]}]}, "messages[1].tool_calls[0]"),
        ({"messages": [*HELLO, {**ASKED, "tool_calls": [{}] * 5000}]}, "messages[1].tool_calls"),
        ({"messages": [*HELLO, {**ASKED, "tool_calls": 5}]}, "messages[1].tool_calls"),
        ({"messages": [{**HELLO[0], "tool_calls": called(name="f")[1]["tool_calls"]}]}, "messages[0].tool_calls"),
        ({"messages": [*HELLO, {"role": "tool", "content": "a", "tool_call_id": 5}]}, "messages[1].tool_call_id"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    messages = fields.pop("messages", HELLO)
    assert refusal(client, messages, **fields) == param


def test_long_arguments_of_earlier_calls_are_read(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "the mat " * 10
    monkeypatch.setattr(chat_route, "LONG_ARGUMENTS", 20)
    given = chat(client, called(name="f", arguments=json.dumps({"text": text, "more": [1, {"a": "é"}]})), max_tokens=1)
    as_object = called(name="f", arguments={"text": text, "more": [1, {"a": "é"}]})
    assert chat(client, as_object, max_tokens=1)["usage"]["prompt_tokens"] == given["usage"]["prompt_tokens"]


# ---------------------------------------------------------------------- other templates


def test_a_template_without_tools_refuses_them_or_is_told_of_them_in_a_message(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "plain", CHATML)
    for server in start_server(ServerConfig(port=0), runtime_config(model_path=folder)):
        with server.client() as client:
            assert refusal(client, tools=TOOLS) == "tools"
            told = client.post("/tokenize", json={"messages": called(name="f", arguments="{}")}).json()["tokens"]
            shown = server.engine.profile.tokenizer.decode(told)
            assert '{"name": "f", "parameters": {}}' in shown
            answer = client.post("/v1/chat/completions", json={"messages": HELLO, "tools": TOOLS})
            assert "--tool-parser" in answer.json()["error"]["message"]
    config = runtime_config(model_path=folder, tool_parser="hermes")
    for server in start_server(ServerConfig(port=0), config):
        with server.client() as client:
            choice = chat(client, tool_choice="required", parallel_tool_calls=False)["choices"][0]
            assert choice["finish_reason"] == "tool_calls"
            with saying(CALL):
                assert chat(client)["choices"][0]["finish_reason"] == "tool_calls"
            assert chat(client, called(name="f", arguments="{}"), max_tokens=1)["usage"]["prompt_tokens"] > 100


def test_a_required_call_comes_behind_a_thought_that_the_template_opened(tmp_path: Path) -> None:
    opened = "{{- '<|im_start|>assistant\\n<think>\\n' }}"
    folder = make_folder(tmp_path / "thinker", HERMES.replace("{{- '<|im_start|>assistant\\n' }}", opened))
    for server in start_server(ServerConfig(port=0), runtime_config(model_path=folder)):
        with server.client() as client:
            closes = server.engine.profile.chat.thinking.closes  # pyright: ignore
            how = {"tool_choice": "required", "parallel_tool_calls": False, "logit_bias": {str(closes): 100}}
            answer = chat(client, **how)
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["message"]["reasoning_content"]) == ("tool_calls", "")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 1


def test_a_parser_that_does_not_go_with_the_model_is_refused_at_the_start(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "plain", CHATML)

    def start(**fields: Any) -> None:
        ready_model(RuntimeConfig(device="cpu", kv_cache_pages=200, **fields))

    with pytest.raises(ConfigError, match="tool_parser: 'llama3' needs a chat template that writes tools"):
        start(model_path=folder, tool_parser="llama3")
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match="tool_parser: needs a chat template"):
        start(model_path=folder, tool_parser="hermes")
    with pytest.raises(ConfigError, match="tool_parser: kestrel-tiny has a chat format of its own"):
        start(tool_parser="hermes")
    with pytest.raises(ConfigError, match="tool_parser: 'xml' is not known"):
        RuntimeConfig(tool_parser="xml")
