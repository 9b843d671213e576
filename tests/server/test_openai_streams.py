"""Streams of OpenAI's routes: framing, one id, role, reason, usage, and failures in the middle."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from kestrel.engine.worker import Cancel
from kestrel.errors import NumericalError
from tests.server.conftest import SCENE_URL, RunningServer
from tests.server.sockets import eventually

COUNTING = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "How many bees are there?"},
            {"type": "image_url", "image_url": {"url": SCENE_URL}},
        ],
    }
]
WHO = [{"role": "user", "content": "Who are you?"}]
USAGE = {"include_usage": True}


def read(client: httpx.Client, path: str, **fields: Any) -> list[dict[str, Any]]:
    body = {"temperature": 0, "stream": True, **fields}
    with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        return chunks_in(b"".join(response.iter_raw()))


def chunks_in(data: bytes) -> list[dict[str, Any]]:
    assert data.endswith(b"data: [DONE]\n\n")
    frames = data.split(b"\n\n")[:-2]
    assert all(frame.startswith(b"data: ") and b"\n" not in frame for frame in frames)
    return [json.loads(frame[6:]) for frame in frames]


def test_a_chat_streams_its_role_its_pieces_and_its_reason(client: httpx.Client) -> None:
    whole = client.post("/v1/chat/completions", json={"messages": WHO, "temperature": 0}).json()
    chunks = read(client, "/v1/chat/completions", messages=WHO)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len(chunks) > 4
    assert all(chunk["usage"] is None for chunk in chunks)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert len(choices) == len(chunks)
    assert "".join(choice["delta"]["content"] for choice in choices) == whole["choices"][0]["message"]["content"]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert choices[-1]["delta"]["content"].endswith(".")


def test_usage_comes_in_a_chunk_of_its_own_or_all_along(client: httpx.Client) -> None:
    fields = {"messages": COUNTING, "reasoning": True}
    whole = client.post("/v1/chat/completions", json={**fields, "temperature": 0}).json()["usage"]
    *chunks, last = read(client, "/v1/chat/completions", **fields, stream_options=USAGE)
    assert last["choices"] == []
    assert {**last["usage"], "prompt_tokens_details": None} == {**whole, "prompt_tokens_details": None}
    assert all(chunk["usage"] is None for chunk in chunks)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = read(client, "/v1/chat/completions", **fields, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == whole["completion_tokens"]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {whole["prompt_tokens"]}


def test_thinking_streams_apart_from_the_answer(client: httpx.Client) -> None:
    whole = client.post("/v1/chat/completions", json={"messages": COUNTING, "temperature": 0, "reasoning": True}).json()
    deltas = [c["choices"][0]["delta"] for c in read(client, "/v1/chat/completions", messages=COUNTING, reasoning=True)]
    message = whole["choices"][0]["message"]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message["reasoning_content"] != ""
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
    hidden = read(client, "/v1/chat/completions", messages=COUNTING, reasoning=True, include_reasoning=False)
    assert [chunk["choices"][0]["delta"] for chunk in hidden] == [
        {"role": "assistant", "content": ""},
        {"content": message["content"]},
    ]


def test_several_choices_share_a_stream(client: httpx.Client) -> None:
    warm = {"temperature": 2.0, "top_p": 1.0, "repetition_penalty": 2.0, "ignore_eos": True, "max_tokens": 12}
    fields = {"messages": WHO, "n": 3, "seed": 11, **warm}
    whole = client.post("/v1/chat/completions", json=fields).json()
    *chunks, last = read(client, "/v1/chat/completions", **fields, stream_options=USAGE)
    for index in range(3):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        text = "".join(choice["delta"]["content"] for choice in mine)
        assert text == whole["choices"][index]["message"]["content"]
        reasons = [choice["finish_reason"] for choice in mine]
        assert reasons == [None] * (len(mine) - 1) + [whole["choices"][index]["finish_reason"]]
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert last["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_log_probabilities_stream_with_their_text(client: httpx.Client) -> None:
    fields = {"messages": WHO, "logprobs": True, "top_logprobs": 2}
    whole = client.post("/v1/chat/completions", json={**fields, "temperature": 0}).json()
    streamed = [
        entry
        for chunk in read(client, "/v1/chat/completions", **fields)
        if chunk["choices"][0]["logprobs"]
        for entry in chunk["choices"][0]["logprobs"]["content"]
    ]
    truth = whole["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in truth]
    assert [e["logprob"] for e in streamed] == pytest.approx([e["logprob"] for e in truth], abs=1e-4)


def test_completions_stream_as_they_answer(client: httpx.Client) -> None:
    fields = {"prompt": ["Who are you?", "a bee"], "max_tokens": 40, "logprobs": 1}
    whole = client.post("/v1/completions", json={**fields, "temperature": 0}).json()
    *chunks, last = read(client, "/v1/completions", **fields, stream_options=USAGE)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    for index, truth in enumerate(whole["choices"]):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in mine) == truth["text"]
        assert mine[-1]["finish_reason"] == truth["finish_reason"]
        for column in ("tokens", "text_offset"):
            assert [value for choice in mine for value in choice["logprobs"][column]] == truth["logprobs"][column]
    assert last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]


def test_an_echo_streams_before_its_text(client: httpx.Client) -> None:
    texts = [c["choices"][0]["text"] for c in read(client, "/v1/completions", prompt="a bee", echo=True, max_tokens=3)]
    assert texts[0] == "a bee"


@pytest.mark.parametrize("num_choices", [1, 2])
def test_a_failure_in_the_middle_is_an_error_chunk_and_the_end(server: RunningServer, num_choices: int) -> None:
    body = {"messages": WHO, "stream": True, "ignore_eos": True, "max_tokens": 1500, "n": num_choices}
    with server.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as response:
        pieces = response.iter_raw()
        data = next(pieces)
        name = next(iter(server.state.running))

        async def fail() -> None:
            server.engine._streams[name].fail(NumericalError("secret numbers at /home/model"))
            server.engine._worker.try_send(Cancel(name))

        server.on_loop(fail)
        data += b"".join(pieces)
    *_, last = chunks_in(data)
    assert last["error"]["code"] == "numerical_error"
    assert "secret" not in last["error"]["message"]
    assert eventually(lambda: server.engine.num_requests == 0)


def test_a_client_that_leaves_ends_all_its_choices(server: RunningServer) -> None:
    body = {"messages": WHO, "stream": True, "ignore_eos": True, "max_tokens": 1500, "n": 3}
    with server.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as response:
        next(response.iter_raw())
        assert server.engine.num_requests == 3
    assert eventually(lambda: server.engine.num_requests == 0)
    assert eventually(lambda: server.state.running == {})
