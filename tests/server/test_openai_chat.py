"""Chat completions, judged by the scene's truth or by the same call of the engine itself."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import jsonschema
import pytest

from tests.scene import BEES, SCENE
from tests.server.conftest import SCENE_BYTES, SCENE_URL, RunningServer

PICTURE = {"type": "image_url", "image_url": {"url": SCENE_URL, "detail": "low"}}
COUNT = {"type": "text", "text": "How many bees are there?"}
COUNTING = [{"role": "user", "content": [COUNT, PICTURE]}]
WHO = [{"role": "user", "content": "Who are you?"}]


def chat(client: httpx.Client, messages: list[Any], **fields: Any) -> dict[str, Any]:
    body = {"model": "kestrel-tiny", "messages": messages, "temperature": 0, **fields}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert (answer["object"], answer["model"]) == ("chat.completion", "kestrel-tiny")
    assert answer["id"] == f"chatcmpl-{response.headers['x-request-id']}"
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return answer


def said(answer: dict[str, Any], index: int = 0) -> str:
    choice = answer["choices"][index]
    assert (choice["index"], choice["message"]["role"]) == (index, "assistant")
    assert choice["finish_reason"] in ("stop", "length")
    return choice["message"]["content"]


def test_chat_counts_what_is_in_the_picture_and_its_tokens(client: httpx.Client, server: RunningServer) -> None:
    answer = chat(client, COUNTING)
    assert said(answer) == str(len(BEES))
    direct = server.on_loop(lambda: server.engine.query(SCENE, COUNT["text"], reasoning=False, temperature=0.0))
    usage = answer["usage"]
    assert usage["prompt_tokens"] == direct.metrics.input_tokens
    assert usage["completion_tokens"] == direct.metrics.output_tokens
    assert usage["prompt_tokens_details"]["image_tokens"] == 729
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert chat(client, COUNTING)["usage"]["prompt_tokens_details"]["cached_tokens"] > 729


@pytest.mark.parametrize(
    "image_url",
    [SCENE_URL, {"url": SCENE_URL}, base64.b64encode(SCENE_BYTES).decode(), {"url": SCENE_URL, "detail": "auto"}],
)
def test_a_picture_may_be_a_url_or_an_object_with_one(client: httpx.Client, image_url: Any) -> None:
    part = {"type": "image_url", "image_url": image_url}
    answer = chat(client, [{"role": "user", "content": [part, {"type": "text", "text": "Is there a dog?"}]}])
    assert said(answer) == "no"


def test_several_turns_and_pictures_are_what_the_chat_skill_makes_of_them(
    client: httpx.Client, server: RunningServer
) -> None:
    image = {"type": "image", "image": SCENE_BYTES}
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Is there a dog?"}, image]},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": [COUNT, image]},
    ]
    direct = server.on_loop(
        lambda: server.engine.run("chat", messages=turns, reasoning=False, temperature=0.0, max_tokens=8)
    )
    asked = json.loads(json.dumps(turns, default=lambda _: None))
    asked[0]["role"] = "developer"
    asked[1]["content"][1] = asked[3]["content"][1] = PICTURE
    asked[1]["name"] = "somebody"
    asked[2] |= {"refusal": None, "tool_calls": None}
    answer = chat(client, asked, max_tokens=8)
    assert said(answer) == direct.text
    assert answer["usage"]["prompt_tokens"] == direct.metrics.input_tokens
    assert answer["usage"]["prompt_tokens_details"]["image_tokens"] == 2 * 729


@pytest.mark.parametrize(
    ("messages", "answer"),
    [
        ([{"role": "user", "content": [PICTURE]}, {"role": "user", "content": COUNT["text"]}], str(len(BEES))),
        ([{"role": "developer", "content": COUNT["text"]}, {"role": "user", "content": [PICTURE]}], str(len(BEES))),
        ([*COUNTING, {"role": "assistant", "content": None}, *COUNTING], None),
        ([{"role": "assistant", "content": "Hello!"}, *WHO], None),
        ([{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}, *WHO], None),
    ],
)
def test_conversations_out_of_turn_are_answered(client: httpx.Client, messages: list[Any], answer: str | None) -> None:
    """What they are taken for: tests/skills/test_chat.py."""
    told = said(chat(client, messages, max_tokens=4))
    assert told == answer or answer is None


def test_a_picture_without_words_is_described(client: httpx.Client) -> None:
    told = said(chat(client, [{"role": "user", "content": [PICTURE]}]))
    assert "bees" in told
    image = {"type": "input_image", "image_url": SCENE_URL}
    asked = {"input": [{"role": "user", "content": [image]}], "temperature": 0}
    (item,) = client.post("/v1/responses", json=asked).json()["output"]
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(SCENE_BYTES).decode()}
    turns = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    message = client.post("/v1/messages", json={"messages": turns, "max_tokens": 60, "temperature": 0}).json()
    assert [item["content"][0]["text"], message["content"][0]["text"]] == [told, told]


@pytest.fixture(scope="module")
def thoughts(server: RunningServer) -> str:
    direct = server.on_loop(lambda: server.engine.query(SCENE, COUNT["text"], reasoning=True, temperature=0.0))
    return direct.output["reasoning"]["text"]


@pytest.mark.parametrize(
    "wish", [{"reasoning_effort": "low"}, {"reasoning": {"effort": "high"}}, {"include_reasoning": True}]
)
def test_thinking_is_shown_beside_the_answer(
    client: httpx.Client, server: RunningServer, thoughts: str, wish: dict[str, Any]
) -> None:
    answer = chat(client, COUNTING, **wish)
    assert said(answer) == str(len(BEES))
    assert answer["choices"][0]["message"]["reasoning_content"] == thoughts
    usage = answer["usage"]
    num_answer = len(server.engine.profile.tokenizer.encode(str(len(BEES))))
    assert usage["completion_tokens"] - usage["completion_tokens_details"]["reasoning_tokens"] == num_answer


@pytest.mark.parametrize(("wish", "thinks"), [({"reasoning_effort": "none"}, False), ({"reasoning": False}, False),
                                              ({"reasoning": True, "include_reasoning": False}, True)])  # fmt: skip
def test_thinking_is_not_shown_unless_asked_for(client: httpx.Client, wish: dict[str, Any], thinks: bool) -> None:
    answer = chat(client, COUNTING, **wish)
    assert "reasoning_content" not in answer["choices"][0]["message"]
    assert (answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0) is thinks


WARM = {"temperature": 2.0, "top_p": 1.0, "repetition_penalty": 2.0, "ignore_eos": True, "max_tokens": 24}
"""Past the end of the sentence it was taught, so that chance has a say."""


def test_several_choices_are_what_their_seeds_say(client: httpx.Client) -> None:
    three, again = (chat(client, WHO, n=3, seed=7, **WARM) for _ in range(2))
    texts = [said(three, index) for index in range(3)]
    assert texts == [said(again, index) for index in range(3)]
    assert len(set(texts)) > 1
    one = chat(client, WHO, seed=7, **WARM)
    assert said(one) == texts[0]
    assert three["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert three["usage"]["completion_tokens"] > one["usage"]["completion_tokens"]


def test_negative_seeds_are_seeds(client: httpx.Client) -> None:
    negative, again, positive = (said(chat(client, WHO, seed=seed, **WARM)) for seed in (-5, -5, 5))
    assert negative == again != positive


def test_both_names_bound_the_answer(client: httpx.Client) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer = chat(client, WHO, **{name: 3})
        assert answer["usage"]["completion_tokens"] == 3
        assert answer["choices"][0]["finish_reason"] == "length"


def test_stops_end_the_answer_before_themselves(client: httpx.Client) -> None:
    whole = said(chat(client, WHO))
    for stop in ("demonstration", [*"012345678", "demonstration"]):
        answer = chat(client, WHO, stop=stop)
        assert said(answer) == whole[: whole.index("demonstration")]
        assert answer["choices"][0]["finish_reason"] == "stop"


def test_logprobs_have_bytes_and_the_likely_tokens(client: httpx.Client) -> None:
    answer = chat(client, WHO, logprobs=True, top_logprobs=3, max_tokens=6)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 6
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == said(answer)
    for entry in content:
        assert len(entry["top_logprobs"]) == 3
        greedy = entry["top_logprobs"][0]
        assert {key: entry[key] for key in ("token", "bytes", "logprob")} == greedy
    assert chat(client, WHO, logprobs=True, max_tokens=1)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert chat(client, WHO, logprobs=False, max_tokens=1)["choices"][0]["logprobs"] is None


def test_a_bias_keeps_a_token_away(client: httpx.Client, server: RunningServer) -> None:
    first = server.engine.profile.tokenizer.encode(said(chat(client, WHO)))[0]
    assert chat(client, WHO, max_tokens=1, logprobs=True)["choices"][0]["logprobs"]["content"][0]["token"] == "I"
    biased = chat(client, WHO, max_tokens=1, logprobs=True, logit_bias={str(first): -100})
    assert biased["choices"][0]["logprobs"]["content"][0]["token"] != "I"


def test_an_answer_keeps_to_its_schema(client: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"bees": {"type": "integer", "minimum": 0, "maximum": 9}},
              "required": ["bees"], "additionalProperties": False}  # fmt: skip
    wanted = {"type": "json_schema", "json_schema": {"name": "count", "schema": schema, "strict": True}}
    value = json.loads(said(chat(client, COUNTING, response_format=wanted, max_tokens=60)))
    jsonschema.validate(value, schema)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": -1, "min_p": None, "n": None, "stop": None, "stream": None, "stream_options": None, "tools": None},
        {"user": "me", "metadata": {"a": 1}, "store": False, "service_tier": "auto", "unheard_of": [1, {"x": 2}]},
        {"tool_choice": "none"},
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "modalities": ["text"], "priority": 3},
        {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}, "stop": []},
        {"response_format": {"type": "text"}, "min_tokens": 1, "ignore_eos": False, "stop_token_ids": [5]},
    ],
)
def test_nulls_unknown_fields_and_harmless_values_change_nothing(client: httpx.Client, fields: dict[str, Any]) -> None:
    assert said(chat(client, COUNTING, **fields)) == str(len(BEES))


def test_ignore_eos_goes_on_to_the_bound(client: httpx.Client) -> None:
    answer = chat(client, COUNTING, ignore_eos=True, max_tokens=9)
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (9, "length")


def test_penalties_change_the_answer(client: httpx.Client, server: RunningServer) -> None:
    fields = {
        "presence_penalty": 2.0,
        "frequency_penalty": 2.0,
        "repetition_penalty": 1.8,
        "max_tokens": 24,
        "ignore_eos": True,
    }
    direct = server.on_loop(
        lambda: server.engine.query(question="Who are you?", reasoning=False, temperature=0.0, **fields)
    )
    answer = said(chat(client, WHO, **fields))
    assert answer == direct.text
    assert answer != said(chat(client, WHO, max_tokens=24, ignore_eos=True))
