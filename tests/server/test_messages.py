"""The Messages API: the same answers as over the OpenAI API, and the anthropic package, unmodified."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from kestrel import default_model
from kestrel.engine.worker import Cancel
from kestrel.errors import NumericalError
from kestrel.server.anthropic import messages
from kestrel.server.config import ServerConfig
from kestrel.server.state import Phase
from tests.server.conftest import KEYS, SCENE_BYTES, SCENE_URL, RunningServer, runtime_config, start_server
from tests.server.long_request import TOKENS
from tests.server.sockets import eventually
from tests.server.test_tools import CALL, HERMES, MARKED, make_folder, saying

PATH = "/v1/messages"
SHORT = {"max_tokens": 60, "temperature": 0}
SDK_SHORT = {"max_tokens": 60, "extra_body": {"temperature": 0}}
"""Versions of the package differ in whether they have a parameter for it."""
WHO = [{"role": "user", "content": "Who are you?"}]
COUNT = {"type": "text", "text": "How many bees are there?"}
PICTURE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(SCENE_BYTES).decode()},
}
COUNTING = [{"role": "user", "content": [PICTURE, COUNT]}]
COUNTING_THERE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": SCENE_URL}}, COUNT]}]
GREET = {
    "name": "greet",
    "description": "Greets.",
    "input_schema": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}},
        "required": ["name"],
    },
}
GREET_THERE = {
    "type": "function",
    "function": {"name": "greet", "description": "Greets.", "parameters": GREET["input_schema"]},
}


FORMAT = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def texts(_one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A text model that thinks and calls tools, in its way."""
    folder = make_folder(tmp_path_factory.mktemp("messages") / "tiny-llama", HERMES)
    yield from start_server(ServerConfig(port=0), runtime_config(model_path=folder))


@pytest.fixture
def text_client(texts: RunningServer) -> Iterator[httpx.Client]:
    with texts.client() as client:
        yield client


def sdk_of(server: RunningServer, key: str = "none") -> Any:
    anthropic = pytest.importorskip("anthropic")
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=60)


def ask(client: httpx.Client, messages: list[Any], **fields: Any) -> dict[str, Any]:
    response = client.post(PATH, json={"messages": messages, **SHORT, **fields})
    assert response.status_code == 200, response.text
    described = client.get("/openapi.json").json()["paths"][PATH]["post"]["responses"]["200"]
    jsonschema.validate(response.json(), described["content"]["application/json"]["schema"])
    return response.json()


def ask_there(client: httpx.Client, messages: list[Any], **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/chat/completions", json={"messages": messages, **SHORT, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def events_of(client: httpx.Client, messages: list[Any], **fields: Any) -> list[dict[str, Any]]:
    with client.stream("POST", PATH, json={"messages": messages, "stream": True, **SHORT, **fields}) as response:
        assert response.status_code == 200, response.read()
        return events_in(response.read().decode())


def events_in(text: str) -> list[dict[str, Any]]:
    frames = [frame.split("\n") for frame in text.split("\n\n")[:-1]]
    events = [json.loads(data.removeprefix("data: ")) for _, data in frames]
    assert [name for name, _ in frames] == [f"event: {event['type']}" for event in events]
    return events


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events of a stream make."""
    message, ending = events[0]["message"], events[-2]
    assert [events[0]["type"], ending["type"], events[-1]["type"]] == ["message_start", "message_delta", "message_stop"]
    open_block: dict[str, Any] = {}
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert not open_block
                assert event["index"] == len(message["content"])
                open_block = {**event["content_block"], "json": ""}
            case "content_block_delta":
                assert event["index"] == len(message["content"])
                field = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
                name = field[event["delta"]["type"]]
                open_block["json" if name == "partial_json" else name] += event["delta"][name]
            case "content_block_stop":
                given = open_block.pop("json")
                message["content"].append({**open_block, **({"input": json.loads(given)} if given else {})})
                open_block = {}
    return {**message, **ending["delta"], "usage": ending["usage"]}


def without_identity(message: dict[str, Any]) -> dict[str, Any]:
    """What two answers to the same question have in common."""
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    usage = message["usage"]["output_tokens"]
    return {**message, "id": None, "content": content, "usage": usage}


# ---------------------------------------------------------------------- the same answers


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ({"messages": COUNTING}, {"messages": COUNTING_THERE}),
        ({"messages": COUNTING, "thinking": {"type": "enabled", "budget_tokens": 1024}},
         {"messages": COUNTING_THERE, "reasoning": True}),
        ({"messages": [*WHO, {"role": "assistant", "content": [{"type": "text", "text": "Me."}]}, *WHO],
          "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]},
         {"messages": [{"role": "system", "content": "Be brief."}, *WHO,
                       {"role": "assistant", "content": "Me."}, *WHO]}),
        ({"messages": WHO, "stop_sequences": ["a", "an"], "top_p": 0.5, "top_k": 3, "metadata": {"user_id": "u"}},
         {"messages": WHO, "stop": ["a", "an"], "top_p": 0.5, "top_k": 3}),
        ({"messages": WHO, "max_tokens": 2}, {"messages": WHO, "max_tokens": 2}),
        ({"messages": WHO, "output_config": {"format": {"type": "json_schema", "schema": FORMAT}, "effort": "high"}},
         {"messages": WHO, "response_format": {"type": "json_schema", "json_schema": {"schema": FORMAT}}}),
    ],
)  # fmt: skip
def test_an_answer_equals_the_one_of_the_openai_api(
    client: httpx.Client, here: dict[str, Any], there: dict[str, Any]
) -> None:
    answer, other = ask(client, **here), ask_there(client, **there)
    message, usage = other["choices"][0]["message"], other["usage"]
    assert answer["content"][-1] == {"type": "text", "text": message["content"]}
    thoughts = [block["thinking"] for block in answer["content"][:-1]]
    assert thoughts == ([message["reasoning_content"]] if "thinking" in here else [])
    told = answer["usage"]
    assert told["input_tokens"] + told["cache_read_input_tokens"] == usage["prompt_tokens"]
    assert told["output_tokens"] == usage["completion_tokens"]
    assert without_identity(put_together(events_of(client, **here))) == without_identity(answer)
    counted = {name: here[name] for name in ("messages", "system", "thinking") if name in here}
    assert client.post(f"{PATH}/count_tokens", json=counted).json() == {"input_tokens": usage["prompt_tokens"]}


@pytest.mark.exhaustive
def test_a_stop_reason_tells_what_ended_the_answer(client: httpx.Client, text_client: httpx.Client) -> None:
    whole = ask(client, WHO)
    text = whole["content"][0]["text"]
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)
    cut = ask(client, WHO, max_tokens=2)
    assert (cut["stop_reason"], cut["usage"]["output_tokens"]) == ("max_tokens", 2)
    assert_stops(client, text)
    thinking = {"thinking": {"type": "adaptive"}}
    assert_stops(client, ask(client, WHO, **thinking)["content"][-1]["text"], **thinking)
    assert_stops(text_client, ask(text_client, WHO)["content"][-1]["text"])


def assert_stops(client: httpx.Client, text: str, **fields: Any) -> None:
    stop = text[4:6]
    stopped = ask(client, WHO, stop_sequences=["nowhere", stop], **fields)
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", stop)
    assert stopped["content"][-1]["text"] == text[: text.index(stop)]


def test_what_was_cached_is_no_part_of_the_input(client: httpx.Client) -> None:
    long = [{"role": "user", "content": "Who are you? " * 20}]
    first, second = (ask(client, long)["usage"] for _ in range(2))
    assert second["cache_read_input_tokens"] > 0
    assert first["input_tokens"] + first["cache_read_input_tokens"] == sum(
        second[name] for name in ("input_tokens", "cache_read_input_tokens")
    )


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A body whose answer lasts; clients cannot ask for that here."""
    monkeypatch.setattr(messages, "SAMPLING", (*messages.SAMPLING, "ignore_eos"))
    monkeypatch.setattr(messages, "FIELDS", (*messages.FIELDS, "ignore_eos"))
    return {"messages": WHO, "max_tokens": TOKENS, "stream": True, "ignore_eos": True}


def test_a_failure_in_the_middle_is_an_error_event_and_the_end(server: RunningServer, endless: dict[str, Any]) -> None:
    with server.client() as client, client.stream("POST", PATH, json=endless) as response:
        pieces = response.iter_text()
        text = next(pieces)
        name = next(iter(server.state.running))

        async def fail() -> None:
            server.engine._streams[name].fail(NumericalError("secret numbers at /home/model"))
            server.engine._worker.try_send(Cancel(name))

        server.on_loop(fail)
        text += "".join(pieces)
    last = events_in(text)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert "secret" not in text
    assert eventually(lambda: server.engine.num_requests == 0)


def test_a_client_that_leaves_ends_its_request(server: RunningServer, endless: dict[str, Any]) -> None:
    with server.client() as client, client.stream("POST", PATH, json=endless) as response:
        next(response.iter_raw())
        assert server.engine.num_requests == 1
    assert eventually(lambda: server.engine.num_requests == 0)
    with server.client() as client, pytest.raises(httpx.ReadTimeout):
        client.post(PATH, json={**endless, "stream": False}, timeout=0.5)
    assert eventually(lambda: server.engine.num_requests == 0)
    assert eventually(lambda: server.state.running == {})


# ---------------------------------------------------------------------- refusals


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stream": 1}, "stream"),
        ({"seed": 1}, "seed"),
        ({"mcp_servers": []}, "mcp_servers"),
        ({"system": 5}, "system"),
        ({"system": [PICTURE]}, "system[0]"),
        ({"messages": []}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [*WHO, {"role": "assistant", "content": "I"}]}, "messages"),
        ({"messages": [{**WHO[0], "name": "a"}]}, "messages[0].name"),
        ({"messages": [{"role": "assistant", "content": [PICTURE]}]}, "messages[0].content[0]"),
        (block(type="video"), "messages[0].content[0]"),
        (block(type="text", text=5), "messages[0].content[0].text"),
        (block(type="text", text="a", citations={"enabled": True}), "messages[0].content[0].citations"),
        (block(type="image", source={"type": "file", "file_id": "a"}), "messages[0].content[0].source"),
        (block(type="image", source={"type": "base64", "data": "§"}), "messages[0].content[0].source.data"),
        (block(type="image", source={"type": "base64", "data": "https://a.example"}),
         "messages[0].content[0].source.data"),
        (block(type="image", source={"type": "url", "url": "https://a.example/b.png"}),
         "messages[0].content[0].source.url"),
        ({"messages": [{"role": "user", "content": [COUNT, {"type": "image", "source": {
            "type": "base64", "data": "AAAA"}}]}]}, "messages[0].content[1]"),
        (block(type="tool_result", tool_use_id=5, content="b"), "messages[0].content[0].tool_use_id"),
        ({"messages": [*WHO, {"role": "assistant", "content": [
            {"type": "tool_use", "id": "a", "name": "f", "input": 5}]}]}, "messages[1].content[0].input"),
        ({"tools": [GREET]}, "tools"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{**GREET, "name": "f g"}]}, "tools[0].name"),
        ({"tools": [{**GREET, "input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
        ({"tools": [{**GREET, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"output_config": 5}, "output_config"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"output_config": {"style": "terse"}}, "output_config.style"),
        ({"output_config": {"format": {"type": "regex"}}}, "output_config.format"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "output_config.format"),
        ({"thinking": True}, "thinking"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "disabled", "display": "omitted"}}, "thinking.display"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(client: httpx.Client, fields: dict[str, Any], field: str) -> None:
    response = client.post(PATH, json={"messages": WHO, **SHORT, **fields})
    assert (response.status_code, response.json()["type"]) == (400, "error"), response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].split(": ")[0] == field


@pytest.mark.parametrize(
    ("path", "name", "remedy"),
    [
        (PATH, "output_format", "use output_config.format"),
        (PATH, "response_format", "use output_config.format"),
        (PATH, "adapter", "write model: name/adapter"),
        (PATH, "stop", "use stop_sequences"),
        (PATH, "max_completion_tokens", "use max_tokens"),
        (PATH, "seed", "ask /v1/chat/completions"),
        (PATH, "reasoning_effort", "use thinking"),
        (PATH, "settings", "write each setting directly into the body"),
        (PATH, "stop_sequence", "did you mean 'stop_sequences'?"),
        (f"{PATH}/count_tokens", "max_tokens", "it changes no count; leave it out"),
    ],
)
def test_a_name_from_elsewhere_is_refused_with_the_one_to_use(
    client: httpx.Client, path: str, name: str, remedy: str
) -> None:
    body = {"messages": WHO, **(SHORT if path == PATH else {}), name: 5}
    answer = client.post(path, json=body)
    assert answer.status_code == 400
    told = answer.json()["error"]["message"]
    assert told.startswith(f"{name}: "), told
    assert remedy in told


def test_a_picture_by_its_address_is_refused_with_the_source_to_send(client: httpx.Client) -> None:
    image = {"type": "image", "source": {"type": "url", "url": "https://a.example/b.png"}}
    answer = client.post(PATH, json={"messages": [{"role": "user", "content": [image]}], **SHORT})
    assert answer.status_code == 400
    assert '{"type": "base64", "media_type": …, "data": …}' in answer.json()["error"]["message"]


def test_every_refusal_on_these_routes_has_their_shape(server: RunningServer, client: httpx.Client) -> None:
    def error_of(response: httpx.Response) -> tuple[int, str]:
        assert response.json()["type"] == "error"
        return response.status_code, response.json()["error"]["type"]

    body = {"messages": WHO, **SHORT}
    assert error_of(client.post(PATH, json={**body, "model": "claude-9"})) == (404, "not_found_error")
    assert error_of(client.post(f"{PATH}/batches", json=body)) == (404, "not_found_error")
    assert error_of(client.get(PATH)) == (405, "invalid_request_error")
    assert error_of(client.post(PATH, content=b"[", headers={"content-type": "text/plain"}))[0] == 415
    server.state.phase = Phase.DRAINING
    full = client.post(PATH, json=body)
    server.state.phase = Phase.READY
    assert (*error_of(full), full.headers["retry-after"]) == (529, "overloaded_error", "1")
    assert "type" not in client.post("/v1/chat/completions", json={}).json()


def test_x_api_key_is_a_key_on_these_routes_and_those_of_models(locked: RunningServer) -> None:
    with locked.client(headers={"x-api-key": KEYS[0]}) as client:
        assert client.get("/v1/models").status_code == 200
        assert client.get("/v1/models/kestrel-tiny").status_code == 200
        assert client.post(PATH, json={"messages": WHO, **SHORT}).status_code == 200
        assert client.post(f"{PATH}/count_tokens", json={"messages": WHO}).status_code == 200
        assert client.post("/v1/chat/completions", json={"messages": WHO}).status_code == 401
    with locked.client(headers={"authorization": f"Bearer {KEYS[0]}"}) as client:
        assert client.post(PATH, json={"messages": WHO, **SHORT}).status_code == 200
    with locked.client(headers={"x-api-key": "wrong"}) as client:
        refused = client.post(PATH, json={"messages": WHO, **SHORT})
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")


# ---------------------------------------------------------------------- tools and templates


def test_calls_are_blocks_whole_and_streamed(text_client: httpx.Client) -> None:
    with saying(f"I look.\n{CALL}\n{CALL.replace('Ann', 'Bob')}"):
        answer = ask(text_client, WHO, tools=[GREET], max_tokens=200)
        events = events_of(text_client, WHO, tools=[GREET], max_tokens=200)
    assert answer["stop_reason"] == "tool_use"
    assert [block["type"] for block in answer["content"]] == ["text", "tool_use", "tool_use"]
    assert [block["input"]["name"] for block in answer["content"][1:]] == ["Ann", "Bob"]
    assert len({block["id"] for block in answer["content"][1:]}) == 2
    assert sum(event.get("delta", {}).get("type") == "input_json_delta" for event in events) > 10
    assert without_identity(put_together(events)) == without_identity(answer)


def test_a_call_that_was_cut_is_left_out_and_the_reason_tells(text_client: httpx.Client) -> None:
    with saying(CALL):
        answer = ask(text_client, WHO, tools=[GREET], max_tokens=60)
    assert answer["stop_reason"] == "max_tokens"
    assert answer["content"] == [{"type": "text", "text": ""}]


def test_a_stop_sequence_before_a_call_is_told(text_client: httpx.Client) -> None:
    with saying(f"I look at Ann.\n{CALL}"):
        answer = ask(text_client, WHO, tools=[GREET], stop_sequences=["Ann"])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "Ann")
    assert answer["content"] == [{"type": "text", "text": "I look at "}]


@pytest.mark.parametrize(
    ("choice", "other"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "any", "disable_parallel_tool_use": True},
         {"tool_choice": "required", "parallel_tool_calls": False}),
        ({"type": "tool", "name": "greet"}, {"tool_choice": {"type": "function", "function": {"name": "greet"}}}),
    ],
)  # fmt: skip
def test_choices_of_tools_are_those_of_the_openai_api(
    text_client: httpx.Client, choice: dict[str, Any], other: dict[str, Any]
) -> None:
    answer = ask(text_client, WHO, tools=[GREET], tool_choice=choice)
    message = ask_there(text_client, WHO, tools=[GREET_THERE], **other)["choices"][0]["message"]
    calls = [block["input"] for block in answer["content"] if block["type"] == "tool_use"]
    assert calls == [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    assert bool(calls) == (choice["type"] in ("any", "tool"))


@pytest.mark.exhaustive
def test_a_model_without_tools_goes_on_after_a_forced_call(client: httpx.Client) -> None:
    forced = {"tools": [GREET], "tool_choice": {"type": "tool", "name": "greet"}}
    (used,) = ask(client, COUNTING, **forced)["content"]
    result = {"type": "tool_result", "tool_use_id": used["id"], "content": "done"}
    called = [*COUNTING, {"role": "assistant", "content": [used]}]
    turns = [*called, {"role": "user", "content": [result, {"type": "text", "text": "Who are you?"}]}]
    said = json.dumps({"name": "greet", "parameters": used["input"]})
    words = [*COUNTING, {"role": "assistant", "content": said}, {"role": "user", "content": "done\nWho are you?"}]
    for more, kind in (({}, "text"), (forced, "tool_use")):
        answer, same = ask(client, turns, **more), ask(client, words, **more)
        assert sum(answer["usage"].values()) == sum(same["usage"].values())
        assert [block["type"] for block in answer["content"]] == [kind]
    assert client.post(f"{PATH}/count_tokens", json={"messages": turns}).status_code == 200


def test_results_of_tools_are_written_as_in_the_openai_api(text_client: httpx.Client) -> None:
    called = {"type": "tool_use", "id": "call-1", "name": "greet", "input": {"name": "Ann"}}
    result = {"type": "tool_result", "tool_use_id": "call-1", "content": [{"type": "text", "text": "done"}]}
    here = [
        *WHO,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm", "signature": "s"}, called]},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]
    function = {"name": "greet", "arguments": '{"name": "Ann"}'}
    there = [
        {"role": "system", "content": "Help."},
        *WHO,
        {"role": "assistant", "content": None, "reasoning_content": "Hm",
         "tool_calls": [{"id": "call-1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "call-1", "content": "done"},
        {"role": "user", "content": "And now?"},
    ]  # fmt: skip
    answer = ask(text_client, here, system="Help.", tools=[GREET], max_tokens=20)
    other = ask_there(text_client, there, tools=[GREET_THERE], max_tokens=20)
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == other["usage"]["prompt_tokens"]
    assert answer["content"][-1]["text"] == other["choices"][0]["message"]["content"]
    counted = {"messages": here, "system": "Help.", "tools": [GREET], "tool_choice": {"type": "any"}}
    assert text_client.post(f"{PATH}/count_tokens", json=counted).json() == {
        "input_tokens": other["usage"]["prompt_tokens"]
    }


def test_an_answer_goes_on_with_a_final_message_of_the_assistant(text_client: httpx.Client) -> None:
    begun = [*WHO, {"role": "assistant", "content": "I am"}]
    other = ask_there(text_client, begun, continue_final_message=True)
    assert ask(text_client, begun)["content"][0]["text"] == other["choices"][0]["message"]["content"]


# ---------------------------------------------------------------------- the anthropic package


def test_the_client_reads_answers_streams_and_counts(locked: RunningServer) -> None:
    with sdk_of(locked, KEYS[0]) as sdk:
        how: Any = {"model": "kestrel-tiny", "messages": COUNTING, **SDK_SHORT}
        whole = sdk.messages.create(**how)
        with sdk.messages.stream(**how, thinking={"type": "enabled", "budget_tokens": 1024}) as stream:
            pieces = list(stream.text_stream)
            final = stream.get_final_message()
        counted = sdk.messages.count_tokens(model="kestrel-tiny", messages=COUNTING)
        output: Any = {"format": {"type": "json_schema", "schema": FORMAT}}
        formatted = sdk.messages.create(**{**how, "messages": WHO}, output_config=output)
        models = [model.id for model in sdk.models.list()]
    assert json.loads(formatted.content[0].text)["a"] in (1, 2)
    assert formatted._request_id
    assert models == ["kestrel-tiny"]
    assert (whole.content[0].text, whole.stop_reason) == ("3", "end_turn")
    assert whole.warnings == final.warnings == [default_model.NOTICE]
    assert not hasattr(formatted, "warnings"), "it had no picture"
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert "".join(pieces) == final.content[1].text
    assert final.usage.cache_read_input_tokens + final.usage.input_tokens >= counted.input_tokens
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def test_refusals_are_the_clients_own_errors(locked: RunningServer) -> None:
    anthropic = pytest.importorskip("anthropic")
    how: Any = {"model": "kestrel-tiny", "messages": WHO, **SDK_SHORT}
    with sdk_of(locked, KEYS[0]) as sdk, sdk_of(locked, "wrong") as stranger:
        with pytest.raises(anthropic.BadRequestError, match="temperature: must be"):
            sdk.messages.create(**{**how, "extra_body": {"temperature": -1}})
        with pytest.raises(anthropic.NotFoundError, match="is not served here"):
            sdk.messages.create(**{**how, "model": "claude-9"})
        with pytest.raises(anthropic.AuthenticationError) as refused:
            stranger.messages.create(**how)
    assert refused.value.request_id


def test_a_loop_of_calls_and_results_as_the_client_runs_it(texts: RunningServer) -> None:
    said: list[Any] = list(WHO)
    with sdk_of(texts) as sdk:
        how: Any = {"model": "tiny-llama", "tools": [GREET], **SDK_SHORT}
        with sdk.messages.stream(messages=said, tool_choice={"type": "tool", "name": "greet"}, **how) as stream:
            first = stream.get_final_message()
        assert (first.stop_reason, first.content[-1].type) == ("tool_use", "tool_use")
        assert isinstance(first.content[-1].input["name"], str)
        said.append({"role": "assistant", "content": first.content})
        result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": f"{MARKED[1]} done"}
        said.append({"role": "user", "content": [result]})
        second = sdk.messages.create(messages=said, tool_choice={"type": "none"}, **how)
    assert second.stop_reason in ("end_turn", "max_tokens")
    assert second.usage.cache_read_input_tokens > 0
