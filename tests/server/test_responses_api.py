"""The Responses API: the same answers as chats, stored for their own client alone, and the openai package's calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from kestrel import default_model
from kestrel.engine.worker import Cancel
from kestrel.errors import NumericalError
from kestrel.server.config import ServerConfig
from kestrel.server.responses_api.routes import RESPONSE
from kestrel.server.responses_api.store import ResponseStore, StoredResponse
from tests.server.conftest import KEYS, SCENE_URL, RunningServer, runtime_config, start_server
from tests.server.long_request import TOKENS
from tests.server.sockets import eventually
from tests.server.test_server_errors import refusal
from tests.server.test_tools import CALL, HERMES, make_folder, saying

PATH = "/v1/responses"
SHORT = {"max_output_tokens": 60, "temperature": 0}
USER = {"role": "user", "content": "Who are you?"}
COUNT = "How many bees are there?"
COUNTING = [
    {"role": "user", "content": [{"type": "input_image", "image_url": SCENE_URL, "detail": "auto"},
                                 {"type": "input_text", "text": COUNT}]}
]  # fmt: skip
COUNTING_THERE = [
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": SCENE_URL}},
                                 {"type": "text", "text": COUNT}]}
]  # fmt: skip
NAMED = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}},
    "required": ["name"],
    "additionalProperties": False,
}
GREET = {"type": "function", "name": "greet", "description": "Greets.", "parameters": NAMED}
GREET_THERE = {"type": "function", "function": {name: GREET[name] for name in ("name", "description", "parameters")}}


@pytest.fixture(scope="module")
def texts(_one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A text model that thinks and calls tools, in its way."""
    folder = make_folder(tmp_path_factory.mktemp("responses") / "tiny-llama", HERMES)
    yield from start_server(ServerConfig(port=0, max_stored_responses=0), runtime_config(model_path=folder))


@pytest.fixture
def text_client(texts: RunningServer) -> Iterator[httpx.Client]:
    with texts.client() as client:
        yield client


def sdk_of(server: RunningServer, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60)


def ask(client: httpx.Client, given: Any, **fields: Any) -> dict[str, Any]:
    response = client.post(PATH, json={"input": given, **SHORT, **fields})
    assert response.status_code == 200, response.text
    jsonschema.validate(response.json(), RESPONSE)
    return response.json()


def ask_there(client: httpx.Client, messages: list[Any], **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 60, "temperature": 0, **fields}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events_of(client: httpx.Client, given: Any, **fields: Any) -> list[dict[str, Any]]:
    with client.stream("POST", PATH, json={"input": given, "stream": True, **SHORT, **fields}) as response:
        assert response.status_code == 200, response.read()
        return events_in(response.read().decode())


def events_in(text: str) -> list[dict[str, Any]]:
    frames = [frame.split("\n") for frame in text.split("\n\n")[:-1]]
    events = [json.loads(data.removeprefix("data: ")) for _, data in frames]
    assert [name for name, _ in frames] == [f"event: {event['type']}" for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def told_items(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that the pieces of a stream make, each opened and closed in its turn."""
    items: list[dict[str, Any]] = []
    said, part = "", None
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert (event["output_index"], event["item"]["status"]) == (len(items), "in_progress")
            items.append(dict(event["item"]))
            said, part = "", None
        elif kind == "content_part.added":
            part = event["part"]
            assert (event["item_id"], part["text"]) == (items[-1]["id"], "")
        elif kind.endswith(".delta"):
            assert (event["item_id"], event["output_index"]) == (items[-1]["id"], len(items) - 1)
            said += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done", "function_call_arguments.done"):
            assert said == (event["arguments"] if kind.startswith("function") else event["text"])
        elif kind == "content_part.done":
            assert part is not None
            assert event["part"] == {**part, "text": said}
        elif kind == "output_item.done":
            filled = {"arguments": said} if part is None else {"content": [{**part, "text": said}]}
            items[-1] |= {**filled, "status": event["item"]["status"]}
            assert event["item"] == items[-1]
    return items


def plain(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the items of two answers to the same question have in common."""
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


# ---------------------------------------------------------------------- the same answers


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ({"input": "Who are you?"}, {"messages": [USER]}),
        ({"input": COUNTING}, {"messages": COUNTING_THERE}),
        ({"input": COUNTING, "reasoning": {"effort": "low", "summary": "auto"}},
         {"messages": COUNTING_THERE, "reasoning_effort": "low"}),
        ({"input": [USER, {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "phase": None,
                           "content": [{"type": "output_text", "text": "Me.", "annotations": [], "logprobs": []}]},
                    {"type": "message", **USER}], "instructions": "Be brief."},
         {"messages": [{"role": "system", "content": "Be brief."}, USER,
                       {"role": "assistant", "content": "Me."}, USER]}),
        ({"input": [{"role": "developer", "content": "Be brief."}, USER], "stop": ["a"], "top_p": 0.5},
         {"messages": [{"role": "developer", "content": "Be brief."}, USER], "stop": ["a"], "top_p": 0.5}),
        ({"input": "Who are you?", "max_output_tokens": 2}, {"messages": [USER], "max_tokens": 2}),
        ({"input": "Who are you?", "text": {"format": {"type": "json_schema", "name": "n", "schema": NAMED}}},
         {"messages": [USER],
          "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": NAMED}}}),
    ],
)  # fmt: skip
def test_answers_and_streams_are_those_of_chats(
    client: httpx.Client, here: dict[str, Any], there: dict[str, Any]
) -> None:
    answer = ask(client, **{"given": here["input"], **{name: here[name] for name in here if name != "input"}})
    other = ask_there(client, **there)
    choice = other["choices"][0]
    texts = [item["content"][0]["text"] for item in answer["output"]]
    thought = choice["message"].get("reasoning_content")
    assert texts == [*([] if thought is None else [thought]), choice["message"]["content"]]
    assert answer["status"] == ("completed" if choice["finish_reason"] == "stop" else "incomplete")
    assert answer["usage"]["input_tokens"] == other["usage"]["prompt_tokens"]
    assert answer["usage"]["output_tokens"] == other["usage"]["completion_tokens"]
    rest = {name: here[name] for name in here if name != "input"}
    events = events_of(client, here["input"], **rest)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"] == {**events[1]["response"], "status": "in_progress", "output": [], "usage": None}
    final = events[-1]["response"]
    assert events[-1]["type"] == f"response.{answer['status']}"
    assert told_items(events) == final["output"]
    assert plain(final["output"]) == plain(answer["output"])
    assert final["id"] == events[0]["response"]["id"] != answer["id"]


def test_the_events_of_a_text_come_in_the_order_of_the_api(client: httpx.Client) -> None:
    kinds = [event["type"] for event in events_of(client, "Who are you?", max_output_tokens=2)]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * kinds.count("response.output_text.delta"),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]


def test_a_failure_in_the_middle_is_a_failed_response_and_the_end(server: RunningServer) -> None:
    body = {"input": "Who are you?", "max_output_tokens": TOKENS, "stream": True, "ignore_eos": True}
    with server.client() as client, client.stream("POST", PATH, json=body) as response:
        pieces = response.iter_text()
        text = next(pieces)
        name = next(iter(server.state.running))

        async def fail() -> None:
            server.engine._streams[name].fail(NumericalError("secret numbers at /home/model"))
            server.engine._worker.try_send(Cancel(name))

        server.on_loop(fail)
        text += "".join(pieces)
    last = events_in(text)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "server_error"
    assert "secret" not in text
    assert eventually(lambda: server.engine.num_requests == 0)
    with server.client() as client:
        assert client.get(f"{PATH}/{last['response']['id']}").status_code == 404


# ---------------------------------------------------------------------- calls


def test_calls_are_items_whole_and_streamed(text_client: httpx.Client) -> None:
    with saying(f"I look.\n{CALL}\n{CALL.replace('Ann', 'Bob')}"):
        answer = ask(text_client, "Hi", tools=[GREET], max_output_tokens=200)
        events = events_of(text_client, "Hi", tools=[GREET], max_output_tokens=200)
    assert [item["type"] for item in answer["output"]] == ["message", "function_call", "function_call"]
    assert [json.loads(item["arguments"])["name"] for item in answer["output"][1:]] == ["Ann", "Bob"]
    assert len({item["call_id"] for item in answer["output"][1:]}) == 2
    assert sum(event["type"] == "response.function_call_arguments.delta" for event in events) > 10
    assert plain(told_items(events)) == plain(events[-1]["response"]["output"]) == plain(answer["output"])


def test_a_call_that_was_cut_is_incomplete(text_client: httpx.Client) -> None:
    with saying(CALL):
        answer = ask(text_client, "Hi", tools=[GREET])
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [(item["type"], item["status"]) for item in answer["output"]] == [("function_call", "incomplete")]


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ({"tool_choice": "auto"}, {"tool_choice": "auto"}),
        ({"tool_choice": "none"}, {"tool_choice": "none"}),
        ({"tool_choice": "required", "parallel_tool_calls": False},
         {"tool_choice": "required", "parallel_tool_calls": False}),
        ({"tool_choice": {"type": "function", "name": "greet"}},
         {"tool_choice": {"type": "function", "function": {"name": "greet"}}}),
    ],
)  # fmt: skip
def test_choices_of_tools_are_those_of_chats(
    text_client: httpx.Client, here: dict[str, Any], there: dict[str, Any]
) -> None:
    answer = ask(text_client, "Hi", tools=[GREET], **here)
    message = ask_there(text_client, [{"role": "user", "content": "Hi"}], tools=[GREET_THERE], **there)["choices"][0]
    calls = [item["arguments"] for item in answer["output"] if item["type"] == "function_call"]
    assert calls == [call["function"]["arguments"] for call in message["message"].get("tool_calls", ())]


def test_a_turn_of_thought_words_and_calls_is_one_message(text_client: httpx.Client) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "greet", "arguments": '{"name": "Ann"}', "id": "fc_1"}
    here = [
        {"role": "user", "content": "Hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"role": "assistant", "content": "I look."},
        call,
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "done"}]},
        {"type": "function_call_output", "call_id": "c2", "output": "done"},
    ]
    function = {"name": "greet", "arguments": '{"name": "Ann"}'}
    calls = [{"id": name, "type": "function", "function": function} for name in ("c1", "c2")]
    there = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": name, "content": "done"} for name in ("c1", "c2")),
    ]
    answer = ask(text_client, here, tools=[GREET], max_output_tokens=20)
    other = ask_there(text_client, there, tools=[GREET_THERE], max_tokens=20)
    assert answer["usage"]["input_tokens"] == other["usage"]["prompt_tokens"]
    assert answer["output"][-1]["content"][0]["text"] == other["choices"][0]["message"]["content"]


# ---------------------------------------------------------------------- refusals


def part(**fields: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [fields]}]}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": []}]}, "input[0].content"),
        ({"input": [{**USER, "name": "a"}]}, "input[0].name"),
        ({"input": [USER, {"role": "assistant", "content": "I"}]}, "input"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}, USER]},
         "input[0].encrypted_content"),
        ({"input": [USER, {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}]}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": 5}]}, "input[0].output"),
        (part(type="input_file", file_data="x"), "input[0].content[0]"),
        (part(type="input_text", text=5), "input[0].content[0].text"),
        (part(type="input_image", file_id="f"), "input[0].content[0].file_id"),
        (part(type="input_image", image_url="https://a.example/b.png"), "input[0].content[0].image_url"),
        ({"instructions": 5}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"store": 1}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"effort": "wild"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "concise"}}, "reasoning.summary"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "f g"}]}, "tools[0].name"),
        ({"tools": [GREET_THERE]}, "tools[0].function"),
        ({"tools": [GREET]}, "tools"),
        ({"tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"metadata": {"a": 5}}, "metadata"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stream_options": {"include_obfuscation": True}, "stream": True}, "stream_options"),
        ({"colour": 1}, "colour"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(client: httpx.Client, fields: dict[str, Any], field: str) -> None:
    response = client.post(PATH, json={"input": "Who are you?", **SHORT, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["message"].split(": ")[0]) == (field, field)


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ({"name": 5}, "input[1].name"),
        ({"arguments": "[]"}, "input[1].arguments"),
        ({"arguments": "[" * 20_000}, "input[1].arguments"),
        ({"call_id": 5}, "input[1].call_id"),
    ],
)
def test_a_fault_in_an_earlier_call_is_told_by_its_own_field(
    text_client: httpx.Client, item: dict[str, Any], field: str
) -> None:
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}", **item}
    response = text_client.post(PATH, json={"input": [USER, call]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field), response.text


# ---------------------------------------------------------------------- stored responses


def test_a_response_goes_on_where_another_ended(client: httpx.Client) -> None:
    first = ask(client, COUNTING, instructions="Be brief.", metadata={"a": "b"})
    second = ask(client, "Who are you?", previous_response_id=first["id"])
    third = ask(client, "And who am I?", previous_response_id=second["id"])
    said = [*COUNTING, *first["output"], USER, *second["output"], {"role": "user", "content": "And who am I?"}]
    at_once = ask(client, said, store=False)
    assert plain(third["output"]) == plain(at_once["output"])
    assert third["usage"]["input_tokens"] == at_once["usage"]["input_tokens"]
    assert client.get(f"{PATH}/{first['id']}").json() == first
    assert client.get(f"{PATH}/{at_once['id']}").status_code == 404
    assert client.get(f"{PATH}/{first['id']}?stream=true").json()["error"]["param"] == "stream"
    deleted = client.delete(f"{PATH}/{first['id']}")
    assert deleted.json() == {"id": first["id"], "object": "response", "deleted": True}
    assert client.delete(f"{PATH}/{first['id']}").json()["error"]["code"] == "response_not_found"
    assert ask(client, "Who are you?", previous_response_id=third["id"]), "it has the whole conversation itself"


@pytest.mark.exhaustive
def test_a_model_without_tools_goes_on_after_a_forced_call(client: httpx.Client) -> None:
    forced = {"tools": [GREET], "tool_choice": {"type": "function", "name": "greet"}}
    called = ask(client, COUNTING, **forced)
    (call,) = called["output"]
    after = ask(client, "Who are you?", previous_response_id=called["id"])
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}
    again = ask(client, [result], previous_response_id=called["id"], **forced)
    said = json.dumps({"name": "greet", "parameters": json.loads(call["arguments"])})
    words = [*COUNTING, {"role": "assistant", "content": said}]
    for answer, turn, more in ((after, "Who are you?", {}), (again, "done", forced)):
        same = ask(client, [*words, {"role": "user", "content": turn}], **more)
        assert answer["usage"]["input_tokens"] == same["usage"]["input_tokens"]
        assert [item["type"] for item in answer["output"]] == ["function_call" if more else "message"]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("response_format", "use text.format"),
        ("guided_json", "use text.format"),
        ("guided_choice", "or ask /v1/chat/completions"),
        ("regex", "or ask /v1/chat/completions"),
        ("max_tokens", "use max_output_tokens"),
        ("max_new_tokens", "use max_output_tokens"),
        ("messages", "use input"),
        ("system", "use instructions"),
        ("reasoning_effort", "use reasoning"),
        ("settings", "write each setting directly into the body"),
        ("instruction", "did you mean 'instructions'?"),
    ],
)
def test_a_name_from_elsewhere_is_refused_with_the_one_to_use(client: httpx.Client, name: str, remedy: str) -> None:
    error = refusal(client.post(PATH, json={"input": "Hi", name: 5}), 400)
    assert error["param"] == name
    assert remedy in error["message"]


def test_what_cannot_be_stored_is_refused_before_it_is_answered(client: httpx.Client) -> None:
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    given = [{"type": "reasoning", "summary": deep}, USER]
    refused = client.post(PATH, json={"input": given, **SHORT})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
    assert ask(client, given, store=False)["status"] == "completed"


def test_a_stored_response_is_its_own_keys_alone(locked: RunningServer) -> None:
    with sdk_of(locked, KEYS[0]) as mine, sdk_of(locked, KEYS[1]) as other:
        how: Any = {"model": "kestrel-tiny", "input": "Who are you?", **SHORT}
        first = mine.responses.create(**how)
        with pytest.raises(openai.NotFoundError):
            other.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError):
            other.responses.delete(first.id)
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            other.responses.create(**how, previous_response_id=first.id)
        assert mine.responses.retrieve(first.id).output_text == first.output_text
        mine.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            mine.responses.retrieve(first.id)


def test_a_server_that_keeps_nothing_says_so(text_client: httpx.Client, texts: RunningServer) -> None:
    answer = ask(text_client, "Hi", max_output_tokens=2)
    assert answer["store"] is False
    refused = text_client.post(PATH, json={"input": "Hi", "store": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "store")
    assert texts.state.responses.num_responses == 0


def stored(num_bytes: int) -> StoredResponse:
    return StoredResponse(b"x" * (num_bytes - 2), (b"x", b"y"))


def test_a_full_store_lets_go_of_the_oldest_of_whoever_holds_the_most() -> None:
    store = ResponseStore(max_responses=4, max_bytes=1000)
    store.keep("quiet", "a", stored(100))
    for number in range(10):
        store.keep("loud", f"b{number}", stored(10))
    assert (store.num_responses, store.num_bytes) == (4, 130)
    assert store.find("quiet", "a") is not None
    assert [name for name in map(str, range(10)) if store.find("loud", f"b{name}")] == ["7", "8", "9"]
    store.keep("loud", "large", stored(950))
    assert store.find("loud", "large") is None, "with the others' it takes too much"
    assert store.find("quiet", "a") is not None
    assert store.remove("quiet", "a")
    assert not store.remove("quiet", "a")
    assert (store.num_responses, store.num_bytes) == (0, 0)


# ---------------------------------------------------------------------- the openai package


class Greeting(BaseModel):
    name: str


def test_the_sdk_reads_answers_streams_and_conversations(locked: RunningServer) -> None:
    with sdk_of(locked, KEYS[0]) as sdk:
        how: Any = {"model": "kestrel-tiny", "input": COUNTING, **SHORT}
        whole = sdk.responses.create(**how)
        kinds = [event.type for event in sdk.responses.create(**how, stream=True)]
        with sdk.responses.stream(**how, reasoning={"effort": "low"}) as stream:
            pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
            final = stream.get_final_response()
        again = sdk.responses.create(**{**how, "input": COUNT}, previous_response_id=whole.id)
    assert (whole.output_text, whole.status) == ("3", "completed")
    for response in (whole, final):
        assert (response.model_extra or {})["warnings"] == [default_model.NOTICE]
    assert kinds[-1] == "response.completed"
    assert [item.type for item in final.output] == ["reasoning", "message"]
    assert "".join(pieces) == final.output_text
    assert again.previous_response_id == whole.id
    assert again.usage is not None
    assert whole.usage is not None
    assert again.usage.input_tokens > whole.usage.input_tokens


def test_the_sdk_parses_answers_and_calls(texts: RunningServer) -> None:
    class Short(Greeting):
        model_config = {"json_schema_extra": {"properties": {"name": {"type": "string", "maxLength": 5}}}}

    with sdk_of(texts) as sdk:
        how: Any = {"model": "tiny-llama", "input": "Hi", "temperature": 0, "max_output_tokens": 100}
        parsed = sdk.responses.parse(**how, text_format=Short)
        assert isinstance(parsed.output_parsed, Short)
        said: list[Any] = [{"role": "user", "content": "Hi"}]
        called = sdk.responses.create(
            **{**how, "input": said}, tools=[GREET], tool_choice={"type": "function", "name": "greet"}
        )
        call = called.output[-1]
        assert call.type == "function_call"
        assert isinstance(json.loads(call.arguments)["name"], str)
        said += [item.model_dump() for item in called.output]
        said.append({"type": "function_call_output", "call_id": call.call_id, "output": "done"})
        ended = sdk.responses.create(**{**how, "input": said}, tools=[GREET], tool_choice="none")
    assert ended.output_text
