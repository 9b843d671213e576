"""What OpenAI's routes refuse, always by the name that the client used, and their description."""

from __future__ import annotations

from typing import Any

import httpx
import jsonschema
import pytest

from kestrel.server.openai.chat import MAX_IMAGES
from tests.server.conftest import SCENE_URL, RunningServer, data_url
from tests.server.sockets import eventually
from tests.server.test_server_errors import refusal

USER = {"role": "user", "content": "Who are you?"}
TOOL = {"type": "function", "function": {"name": "f"}}


def said_with(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}, *parts]}]}


def picture(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": url}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "assistant", "content": "x"}]}, "messages"),
        ({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [{}]}, USER]},
         "messages[1].tool_calls[0]"),
        ({"messages": [USER, {"role": "assistant", "function_call": {"name": "f"}}, USER]},
         "messages[1].function_call"),
        ({"messages": [{"role": "system", "content": [picture(SCENE_URL)]}, USER]}, "messages[0].content"),
        (said_with({"type": "input_audio"}), "messages[0].content[1]"),
        (said_with({"type": "image", "image": "/etc/passwd"}), "messages[0].content[1]"),
        (said_with(picture(None)), "messages[0].content[1].image_url"),
        (said_with(picture({"url": 5})), "messages[0].content[1].image_url.url"),
        (said_with(picture("https://example.com/a.png")), "messages[0].content[1].image_url"),
        (said_with(picture("/etc/passwd")), "messages[0].content[1].image_url"),
        (said_with(picture(data_url(b"no picture"))), "messages[0].content[1].image_url"),
        (said_with(picture(SCENE_URL), picture(data_url(b"no picture"))), "messages"),
        (said_with(*[picture(SCENE_URL)] * (MAX_IMAGES + 1)), f"messages[0].content[{MAX_IMAGES + 1}].image_url"),
        ({"tools": [TOOL]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {}}, "audio"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": 5}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.01}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": True}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ["a" * 900] * 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": "x"}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 65}, "top_logprobs"),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"priority": "high"}, "priority"),
        ({"reasoning": "yes"}, "reasoning"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"include_reasoning": 1}, "include_reasoning"),
        ({"model": 5}, "model"),
    ],
)  # fmt: skip
def test_a_bad_field_of_a_chat_is_named(client: httpx.Client, change: dict[str, Any], param: str) -> None:
    error = refusal(client.post("/v1/chat/completions", json={"messages": [USER], **change}), 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            {"role": "usr", "content": "x"},
            "must be one of: system, user, assistant, developer, tool (got 'usr'); did",
        ),
        ({"role": "user", "content": None}, "is null; give a text, or a list of parts"),
        ({"role": "user"}, "is missing; give a text, or a list of parts"),
        ({"role": "user", "content": [picture("file:///etc/passwd")]}, "is a file:// address, which is not read here"),
        ({"role": "user", "content": [picture("photos/cow.JPG")]}, "is the name of a file; send what is in the file"),
    ],
)
def test_a_fault_in_a_message_is_told_with_a_remedy(client: httpx.Client, message: dict[str, Any], told: str) -> None:
    error = refusal(client.post("/v1/chat/completions", json={"messages": [message]}), 400)
    assert error["message"].startswith(f"{error['param']}: {told}")


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/v1/chat/completions", {}, "messages: is required"),
        ("/v1/completions", {"prompt": None}, "prompt: is required"),
        ("/v1/embeddings", {}, "input: is required"),
        ("/v1/responses", {}, "input: is required"),
        ("/v1/responses", {"input": [{"role": "user", "content": None}]}, "input[0].content: is missing or null"),
        ("/v1/messages", {"max_tokens": 5}, "messages: is required"),
        ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": None}]},
         "messages[0].content: is null; give"),
    ],
)  # fmt: skip
def test_what_is_missing_is_not_called_none(client: httpx.Client, path: str, body: dict[str, Any], told: str) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(told)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": ["a", [5]]}, "prompt"),
        ({"prompt": [5, "a"]}, "prompt"),
        ({"prompt": [5.5]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": ["a"] * 2049}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2, "stream": True}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": True}, "best_of"),
        ({"echo": 1}, "echo"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 65}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
    ],
)
def test_a_bad_field_of_a_completion_is_named(client: httpx.Client, change: dict[str, Any], param: str) -> None:
    error = refusal(client.post("/v1/completions", json={"prompt": "a", **change}), 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": [[]]}, "input[0]"),
        ("/v1/embeddings", {"input": ["a", 5]}, "input[1]"),
        ("/v1/embeddings", {"input": [99999]}, "input"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input"),
        ("/v1/embeddings", {"input": [picture(SCENE_URL), picture(SCENE_URL)]}, "input"),
        ("/v1/embeddings", {"input": [picture(data_url(b"no picture"))]}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 5}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [USER], "prompt": "a"}, "prompt"),
        ("/tokenize", {"messages": [USER], "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": [USER], "tools": [{}]}, "tools"),
        ("/tokenize", {"messages": [USER], "add_generation_prompt": False}, "add_generation_prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "bee " * 50_000}]}, "messages"),
        ("/tokenize", {"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ("/tokenize", said_with(picture(SCENE_URL)), "messages[0].content[1].image_url"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [99999]}, "tokens"),
    ],
)
def test_a_bad_field_elsewhere_is_named(client: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    assert refusal(client.post(path, json=body), 400)["param"] == param


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [USER]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
def test_another_model_is_not_found(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    assert refusal(client.post(path, json={**body, "model": "gpt-9"}), 404)["code"] == "model_not_found"


def test_an_unknown_adapter_is_a_model_that_is_not_found(client: httpx.Client) -> None:
    body = {"model": "kestrel-tiny/01J5@1000", "messages": [USER]}
    error = refusal(client.post("/v1/chat/completions", json=body), 404)
    assert error["code"] == "model_not_found"
    assert "01J5@1000" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_never_fits_says_how_long_it_may_be(
    client: httpx.Client, server: RunningServer, stream: bool
) -> None:
    length = server.engine.max_model_length
    text = "bee " * length
    for path, body, param in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}, "messages"),
        ("/v1/completions", {"prompt": text}, "prompt"),
    ):
        error = refusal(client.post(path, json={**body, "stream": stream}), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert f"This model's maximum context length is {length} tokens" in error["message"]


def test_one_bad_prompt_refuses_the_batch_and_leaves_nothing_running(
    client: httpx.Client, server: RunningServer
) -> None:
    refusal(client.post("/v1/completions", json={"prompt": [[5, 6], [99999]], "max_tokens": 50}), 400)
    assert server.state.running == {}
    assert eventually(lambda: server.engine.num_requests == 0)


def test_the_description_is_valid_and_describes_what_is_sent(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    bodies = {
        "/v1/chat/completions": {"messages": [USER], "max_tokens": 2, "logprobs": True, "seed": None},
        "/v1/completions": {"prompt": [[5, 6]], "max_tokens": 2, "logprobs": 1, "echo": True},
        "/v1/embeddings": {"input": ["a bee"]},
        "/tokenize": {"prompt": "a bee"},
        "/detokenize": {"tokens": [5]},
    }
    for path, body in bodies.items():
        described = paths[path]["post"]
        schema = described["requestBody"]["content"]["application/json"]["schema"]
        jsonschema.Draft202012Validator.check_schema(schema)
        for answer in (described["responses"]["200"], described["responses"]["400"]):
            jsonschema.Draft202012Validator.check_schema(answer["content"]["application/json"]["schema"])
        jsonschema.validate(body, schema)
        answer = client.post(path, json=body).json()
        jsonschema.validate(answer, described["responses"]["200"]["content"]["application/json"]["schema"])
    for path in ("/v1/models", "/tokenizer_info"):
        schema = paths[path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        jsonschema.validate(client.get(path).json(), schema)
        assert schema["required"]
    assert {"400", "401", "404", "408", "413", "429", "500", "503"} <= paths["/v1/completions"]["post"][
        "responses"
    ].keys()
