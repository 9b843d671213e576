"""Fields of vLLM and SGLang that would change an answer: each is honoured, or refused by name. So are names that were
meant for known ones. Those that mean nothing here have no effect, and the answer says so."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from kestrel.server.openai import chat, completions, embeddings
from kestrel.server.openai.model_info import TOKEN_FIELDS
from kestrel.server.openai.parameters import MAX_FOREIGN, UNUSED
from tests.server.conftest import RunningServer
from tests.server.test_openai_completions import complete, encode
from tests.server.test_server_errors import refusal

PATHS = {
    "/v1/completions": {"prompt": "Who are you?"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Who are you?"}]},
}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_beam_search", True),
        ("length_penalty", 0.8),
        ("early_stopping", True),
        ("best_of", 2),
        ("truncate_prompt_tokens", 5),
        ("prompt_logprobs", 0),
        ("logprob_token_ids", [5]),
        ("include_stop_str_in_output", True),
        ("no_stop_trim", True),
        ("stop_regex", "a+"),
        ("skip_special_tokens", False),
        ("bad_words", ["bee"]),
        ("logits_processors", ["numpy.sum"]),
        ("custom_logit_processor", "x"),
        ("repetition_detection", {"max_pattern_size": 3}),
        ("thinking_token_budget", 5),
        ("lora_path", "a"),
        ("prompt_embeds", "x"),
        ("return_token_ids", True),
        ("return_tokens_as_token_ids", True),
        ("return_hidden_states", True),
        ("guided_grammar", "root ::= 'a'"),
        ("ebnf", "root ::= 'a'"),
        ("structural_tag", "{}"),
        ("guided_whitespace_pattern", " "),
        ("allowed_token_ids", []),
        ("min_tokens", -1),
        ("ignore_eos", 1),
    ],
)
def test_a_wish_that_cannot_be_met_is_refused_by_name(client: httpx.Client, name: str, value: Any) -> None:
    for path, body in PATHS.items():
        error = refusal(client.post(path, json={**body, name: value}), 400)
        assert (error["param"], error["message"].partition(":")[0]) == (name, name)


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        ("/v1/completions", "tools", [{"type": "function", "function": {"name": "f"}}]),
        ("/v1/completions", "tool_choice", "required"),
        ("/v1/completions", "messages", [{"role": "user", "content": "x"}]),
        ("/v1/completions", "reasoning_effort", "high"),
        ("/v1/completions", "add_special_tokens", "yes"),
        ("/v1/chat/completions", "echo", True),
        ("/v1/chat/completions", "add_special_tokens", True),
        ("/v1/chat/completions", "add_generation_prompt", False),
        ("/v1/chat/completions", "continue_final_message", True),
        ("/v1/chat/completions", "chat_template", "{{ messages }}"),
        ("/v1/chat/completions", "documents", [{"text": "x"}]),
        ("/v1/chat/completions", "separate_reasoning", False),
    ],
)
def test_a_wish_for_the_other_route_is_refused_by_name(client: httpx.Client, path: str, name: str, value: Any) -> None:
    assert refusal(client.post(path, json={**PATHS[path], name: value}), 400)["param"] == name


@pytest.mark.parametrize("path", PATHS)
def test_the_defaults_of_other_servers_may_be_sent(client: httpx.Client, path: str) -> None:
    defaults = {
        "use_beam_search": False, "length_penalty": 1.0, "early_stopping": False, "best_of": 1,
        "truncate_prompt_tokens": None, "prompt_logprobs": None, "include_stop_str_in_output": False,
        "no_stop_trim": False, "skip_special_tokens": True, "spaces_between_special_tokens": False, "bad_words": [],
        "logits_processors": None, "allowed_token_ids": None, "min_tokens": 0, "ignore_eos": False,
        "return_token_ids": False, "guided_json": None, "guided_decoding_backend": "auto", "structured_outputs": None,
        "add_special_tokens": path == "/v1/completions", "echo": False, "continue_final_message": False,
        "tools": [] if path == "/v1/completions" else None, "user": "me", "metadata": {}, "cache_salt": "x",
    }  # fmt: skip
    plain = {**PATHS[path], "max_tokens": 2, "temperature": 0}
    answers = [client.post(path, json=body) for body in (plain, {**plain, **defaults})]
    assert [answer.status_code for answer in answers] == [200, 200], answers[1].text
    assert answers[0].json()["choices"] == answers[1].json()["choices"]


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("max_new_tokens", 2, "use max_tokens"),
        ("min_new_tokens", 2, "use min_tokens"),
        ("variant", "x", "use adapter, or write model: name/adapter"),
        ("settings", {"temperature": 9}, "write each setting directly into the body"),
        ("suppressed_ids", [5], "logit_bias"),
        ("allowed_ids", [5], "use allowed_token_ids"),
        ("request_id", "a", "header X-Request-Id"),
        ("extra_body", {"top_k": 5}, "write its fields directly into the body"),
        ("mirostat", 2, "use top_p, top_k or min_p"),
        ("temprature", 2, "did you mean temperature?"),
        ("maxTokens", 2, "did you mean max_tokens?"),
        ("max-completion-tokens", 2, "did you mean max_completion_tokens?"),
        ("guided_choise", ["a"], "did you mean guided_choice?"),
        ("guided_foo", "a", "did you mean guided_json, guided_regex or guided_choice?"),
        ("regexp", "a", "did you mean regex?"),
        ("streaming", True, "use stream"),
    ],
)
def test_a_name_that_was_meant_for_another_is_refused_with_that_one(
    client: httpx.Client, name: str, value: Any, remedy: str
) -> None:
    for path, body in PATHS.items():
        error = refusal(client.post(path, json={**body, name: value}), 400)
        assert error["param"] == name
        assert remedy in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"prompt": "a"}, "prompt"),
        ("/v1/chat/completions", {"image_url": "a"}, "image_url"),
        ("/v1/chat/completions", {"verbosity": "low"}, "verbosity"),
        ("/v1/chat/completions", {"stream": True, "stream_options": {"include_usge": True}},
         "stream_options.include_usge"),
        ("/v1/chat/completions", {"reasoning": {"efort": "high"}}, "reasoning.efort"),
        ("/v1/completions", {"input": "a"}, "input"),
        ("/v1/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/embeddings", {"input": "a", "dimension": 3}, "dimension"),
        ("/v1/embeddings", {"input": "a", "temperature": 1}, "temperature"),
        ("/v1/embeddings", {"input": "a", "settings": {}}, "settings"),
        ("/tokenize", {"prompt": "a", "add_special_token": False}, "add_special_token"),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}, "return_token_strs"),
        ("/detokenize", {"token": [5]}, "token"),
    ],
)  # fmt: skip
def test_a_name_of_another_route_is_refused(client: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    assert refusal(client.post(path, json={**PATHS.get(path, {}), **body}), 400)["param"] == param


@pytest.mark.parametrize("path", PATHS)
def test_names_that_mean_nothing_here_change_nothing(client: httpx.Client, path: str) -> None:
    """What OpenAI's and other clients send along, and names of nobody."""
    unused = dict.fromkeys(UNUSED, "x")
    foreign = {"top_n_words": 3, "litellm_params": {}, "provider": {"sort": "price"}, "user_id": "me", "timeout": 5}
    plain = {**PATHS[path], "max_tokens": 2, "temperature": 0}
    answers = [client.post(path, json={**plain, **more}) for more in ({}, unused, foreign)]
    assert [answer.status_code for answer in answers] == [200] * 3, [answer.text for answer in answers]
    assert answers[0].json()["choices"] == answers[1].json()["choices"] == answers[2].json()["choices"]
    told = f"Not known here and without effect: {', '.join(foreign)}."
    assert [told in answer.json().get("warnings", ()) for answer in answers] == [False, False, True]


FOREIGN: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", "sent_at": 5}]}, "messages[0].sent_at"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "hue": 1}]}]},
     "messages[0].content[0].hue"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", "context": 5}]}, "messages[0].context"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", "_id": 5}]}, "messages[0]._id"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x" * 60: 1}]}]},
     "messages[0].content[0]." + "x" * 39 + "…"),
    ("/v1/chat/completions", {"reasoning": {"enabled": False, "style": "x"}}, "reasoning.style"),
    ("/v1/chat/completions", {"stream": True, "stream_options": {"colours": 3}}, "stream_options.colours"),
    ("/v1/completions", {"stream": True, "provider": "x"}, "provider"),
    ("/v1/embeddings", {"input": "a", "provider": "x"}, "provider"),
    ("/tokenize", {"prompt": "a", "provider": "x"}, "provider"),
    ("/tokenize", {"messages": [{"role": "user", "content": "a", "sent_at": 5}]}, "messages[0].sent_at"),
    ("/detokenize", {"tokens": [5], "provider": "x"}, "provider"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "name"), FOREIGN)
def test_an_answer_names_what_had_no_effect(client: httpx.Client, path: str, body: dict[str, Any], name: str) -> None:
    limited = {"max_tokens": 1} if path in PATHS else {}
    answer = client.post(path, json={**PATHS.get(path, {}), **limited, **body})
    assert answer.status_code == 200, answer.text
    told = f"Not known here and without effect: {name}."
    assert answer.text.count(told) == 1, answer.text


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"contents": "a"}, "messages[0].contents"),
        ({"content": None, "contents": "a"}, "messages[0].contents"),
        ({"content": [{"type": "text", "txt": "b"}]}, "messages[0].content[0].txt"),
    ],
)
def test_a_misspelt_field_of_a_message_is_refused(client: httpx.Client, message: dict[str, Any], param: str) -> None:
    body = {"messages": [{"role": "user", **message}]}
    assert refusal(client.post("/v1/chat/completions", json=body), 400)["param"] == param


def test_a_name_in_every_message_counts_once(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "a", "sent_at": number} for number in range(2 * MAX_FOREIGN)]
    answer = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    assert answer.json()["warnings"] == ["Not known here and without effect: messages[0].sent_at."]


def test_null_is_not_given_in_parts_and_options(client: httpx.Client) -> None:
    part = {"type": "text", "text": "a", "image_url": None, "texts": None}
    body = {"messages": [{"role": "user", "content": [part], "contents": None}], "max_tokens": 1}
    assert "warnings" not in client.post("/v1/chat/completions", json=body).json()


def test_thoughts_are_hidden_where_the_request_excludes_them(client: httpx.Client) -> None:
    def message(**reasoning: Any) -> dict[str, Any]:
        body = {**CHAT, "reasoning": {"enabled": True, **reasoning}}
        return client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]

    assert "reasoning_content" in message()
    assert "reasoning_content" not in message(exclude=True)
    budget = {**CHAT, "reasoning": {"enabled": True, "max_tokens": 5}}
    assert refusal(client.post("/v1/chat/completions", json=budget), 400)["param"] == "reasoning.max_tokens"


def test_names_that_nobody_knows_are_counted_over_all_messages(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "a", f"zz{number}": 1} for number in range(MAX_FOREIGN + 1)]
    for num_messages, status in ((MAX_FOREIGN, 200), (MAX_FOREIGN + 1, 400)):
        body = {"messages": messages[:num_messages], "max_tokens": 1}
        assert client.post("/v1/chat/completions", json=body).status_code == status


def test_many_names_that_nobody_knows_are_refused(client: httpx.Client) -> None:
    many = {f"zz{number}": 1 for number in range(MAX_FOREIGN + 1)}
    path = "/v1/chat/completions"
    error = refusal(client.post(path, json={**PATHS[path], **many}), 400)
    assert (error["param"], str(MAX_FOREIGN) in error["message"]) == (f"zz{MAX_FOREIGN}", True)
    del many["zz0"]
    assert client.post(path, json={**PATHS[path], "max_tokens": 1, **many}).status_code == 200


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("/v1/chat/completions", chat.FIELDS),
        ("/v1/completions", completions.FIELDS),
        ("/v1/embeddings", embeddings.FIELDS),
        ("/tokenize", TOKEN_FIELDS),
        ("/detokenize", TOKEN_FIELDS),
    ],
)
def test_every_field_of_the_description_is_known(client: httpx.Client, path: str, known: frozenset[str]) -> None:
    content = client.get("/openapi.json").json()["paths"][path]["post"]["requestBody"]["content"]
    assert content["application/json"]["schema"]["properties"].keys() <= known


FORMATS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"guided_json": SCHEMA}, {"type": "json_schema", "json_schema": {"schema": SCHEMA}}),
    ({"guided_json": json.dumps(SCHEMA)}, {"type": "json_schema", "json_schema": {"schema": SCHEMA}}),
    ({"json_schema": json.dumps(SCHEMA)}, {"type": "json_schema", "json_schema": {"schema": SCHEMA}}),
    ({"structured_outputs": {"json": SCHEMA}}, {"type": "json_schema", "json_schema": {"schema": SCHEMA}}),
    ({"guided_regex": "[0-9]{3}"}, {"type": "regex", "regex": "[0-9]{3}"}),
    ({"regex": "[0-9]{3}"}, {"type": "regex", "regex": "[0-9]{3}"}),
    ({"structured_outputs": {"regex": "[0-9]{3}", "json": None}}, {"type": "regex", "regex": "[0-9]{3}"}),
    ({"guided_choice": ["a.b", "c|d"]}, {"type": "choice", "choices": ["a.b", "c|d"]}),
    ({"structured_outputs": {"choice": ["a.b", "c|d"]}}, {"type": "choice", "choices": ["a.b", "c|d"]}),
    ({"structured_outputs": {"json_object": True}}, {"type": "json_object"}),
    ({"structured_outputs": {"json_object": False}}, {"type": "text"}),
]


@pytest.mark.parametrize(("borrowed", "own"), FORMATS)
def test_a_format_by_another_name_is_the_same_format(
    client: httpx.Client, borrowed: dict[str, Any], own: dict[str, Any]
) -> None:
    for path, body in PATHS.items():
        asked = {**body, "temperature": 0, "max_tokens": 8}
        answers = [client.post(path, json=asked | one) for one in (borrowed, {"response_format": own})]
        assert answers[0].status_code == 200, answers[0].text
        assert answers[0].json()["choices"] == answers[1].json()["choices"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        ({"guided_choice": ["a"], "response_format": {"type": "json_object"}}, "guided_choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[" * 70_000}, "guided_json"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_json": {"type": "nonsense"}}, "guided_json"),
        ({"guided_json": {"multipleOf": 0}}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"regex": "(a{200}){200}"}, "regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": 5}, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
         "structured_outputs.disable_any_whitespace"),
        ({"guided_regex": "a", "allowed_token_ids": [5]}, "guided_regex"),
    ],
)  # fmt: skip
def test_a_fault_in_a_format_is_told_by_the_name_that_the_client_used(
    client: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    error = refusal(client.post("/v1/completions", json={"prompt": "a", **fields}), 400)
    assert (error["param"], error["message"].partition(":")[0]) == (param, param)


TOOLS = [
    {"type": "function", "function": {"name": "tell", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]
CHAT = {**PATHS["/v1/chat/completions"], "temperature": 0, "max_tokens": 60}


@pytest.mark.parametrize("reasons", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "tell"}}])
def test_a_model_without_tools_calls_one_when_it_has_to(client: httpx.Client, choice: Any, reasons: bool) -> None:
    """A call that is required is a format."""
    asked = {**CHAT, "tools": TOOLS, "tool_choice": choice, "reasoning": reasons}
    (answer,) = client.post("/v1/chat/completions", json=asked).json()["choices"]
    assert (answer["finish_reason"], answer["message"]["content"]) == ("tool_calls", None)
    assert ("reasoning_content" in answer["message"]) is reasons
    (call,) = answer["message"]["tool_calls"]
    fits = call["function"]["name"] == "stop" or json.loads(call["function"]["arguments"])["a"] in (1, 2)
    assert fits, call
    assert call["function"]["name"] in (("tell",) if isinstance(choice, dict) else ("tell", "stop"))


def test_a_model_without_tools_reads_its_earlier_call(client: httpx.Client) -> None:
    asked = {**CHAT, "tools": TOOLS, "tool_choice": "required"}
    (first,) = client.post("/v1/chat/completions", json=asked).json()["choices"]
    (call,) = first["message"]["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "a must be 2"}
    turns = [*CHAT["messages"], first["message"], result]
    function = call["function"]
    said = json.dumps({"name": function["name"], "parameters": json.loads(function["arguments"])})
    words = [*CHAT["messages"], {"role": "assistant", "content": said}, {"role": "user", "content": result["content"]}]
    answers = [
        client.post("/v1/chat/completions", json={**asked, "messages": messages}).json() for messages in (turns, words)
    ]
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]
    (again,) = answers[0]["choices"]
    assert again["finish_reason"] == "tool_calls"


def test_tools_that_may_not_be_called_change_nothing(client: httpx.Client) -> None:
    answers = [
        client.post("/v1/chat/completions", json={**CHAT, **more}).json()
        for more in ({}, {"tool_choice": "none"}, {"tools": TOOLS, "tool_choice": "none"})
    ]
    assert answers[0]["choices"] == answers[1]["choices"] == answers[2]["choices"]
    assert len({answer["usage"]["prompt_tokens"] for answer in answers}) == 1
    error = refusal(client.post("/v1/chat/completions", json={**CHAT, "tools": TOOLS}), 400)
    assert error["param"] == "tools"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Who are you, and whose salt is this?"}]}),
        ("/v1/completions", {"prompt": "Who are you, and whose salt is that?"}),
        ("/v1/responses", {"input": "Who are you, and whose salt was this?"}),
    ],
)
def test_prompts_are_shared_only_by_requests_of_one_salt(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    def num_cached(salt: str | None) -> int:
        usage = client.post(path, json={**body, "cache_salt": salt}).json()["usage"]
        return (usage.get("prompt_tokens_details") or usage["input_tokens_details"])["cached_tokens"]

    first, others, again = num_cached("a"), [num_cached("b"), num_cached(None)], num_cached("a")
    assert again > max(first, *others)


def test_only_allowed_ids_are_drawn(client: httpx.Client, server: RunningServer) -> None:
    ids = encode(server, " red blue")
    answer = complete(client, "Who are you?", allowed_token_ids=ids, max_tokens=6, logprobs=0)
    names = {server.engine.profile.tokenizer.decode([token_id]) for token_id in ids}
    assert set(answer["choices"][0]["logprobs"]["tokens"]) <= names
    assert answer["usage"]["completion_tokens"] == 6


def test_without_special_tokens_a_text_is_its_ids_alone(client: httpx.Client, server: RunningServer) -> None:
    ids = encode(server, "Who are you?")
    bare = complete(client, "Who are you?", add_special_tokens=False, max_tokens=5, echo=True, logprobs=0)
    by_ids = complete(client, ids, max_tokens=5, echo=True, logprobs=0)
    assert (bare["choices"], bare["usage"]["prompt_tokens"]) == (by_ids["choices"], len(ids))
