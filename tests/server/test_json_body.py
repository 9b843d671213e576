"""A request's body: each key once, at any depth, and no refusal of what is merely odd."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random

import httpx
import pytest

from kestrel.errors import RequestError
from kestrel.server.json_body import parse_json
from tests.cpu_time import least_cpu_s
from tests.server.conftest import SCENE_URL
from tests.server.sockets import JSON

CHAT = b'{"messages": [{"role": "user", "role": "user", "content": "Who are you?"}], "max_tokens": 1}'


@pytest.mark.parametrize(
    ("body", "key"),
    [
        (b'{"question": "Who?", "question": "What?"}', "question"),
        (b'{"settings": {"seed": 1, "seed": 1}}', "seed"),
        (b'{"a": [[{"deep": null, "other": 2, "deep": 3}]]}', "deep"),
        (b'{"caf\\u00e9": 1, "caf\xc3\xa9": 2}', "caf\u00e9"),
        (b'{"": 1, "": 2}', "''"),
        (b'{"a": "\\u003a", "b": 1, "b": 2}', "b"),
        (b'{"a": "\\\\u003a", "b": 1, "b": 2}', "b"),
        (b'{"a": ["' + b":" * 100 + b'"], "b": 1, "b": 2}', "b"),
    ],
)
def test_a_key_given_twice_is_refused_by_its_name(body: bytes, key: str) -> None:
    with pytest.raises(RequestError, match="given twice") as refusal:
        parse_json(body)
    assert key in str(refusal.value)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": {"a": {"a": 1}}, "b": [{"a": 1}, {"a": 2}]}',
        b'{"a": "\\"a\\": 1, \\"a\\": 2"}',
        b'{"a": 1, "A": 2, " a": 3}',
        b'{"number": 1234567890123, "other": 1e5, "small": -0.0}',
        b'{"a\\u003A": "\\u003a\\\\\\u003a \\\\u003a", "b": [":", {":": ":"}]}',
        b'{"a": ["' + b":" * 100 + b'"], "b": [{"c": {"d": [[1, 2.5, null, true]]}}]}',
    ],
)
def test_a_key_that_only_looks_repeated_is_not(body: bytes) -> None:
    assert parse_json(body) == json.loads(body)


TEXTS = ("a", "b", "a:", ":", "\u003a", "", "{", "é", '"')


def written(rng: random.Random, depth: int) -> str:
    """Some JSON, with repeated keys, colons in texts and escapes now and then."""
    kind = rng.choice(("text", "number", "object", "list")) if depth else "object"
    if kind == "object" and depth < 4:
        entries = (f"{spelled(rng)} :{written(rng, depth + 1)}" for _ in range(rng.randrange(4)))
        return f"{{{', '.join(entries)}}}"
    if kind == "list" and depth < 4:
        return f"[{', '.join(written(rng, depth + 1) for _ in range(rng.randrange(3)))}]"
    return spelled(rng) if kind == "text" else "-1.5e3"


def spelled(rng: random.Random) -> str:
    text = json.dumps(rng.choice(TEXTS), ensure_ascii=rng.random() < 0.5)
    return text.replace(":", "\\u003a") if rng.random() < 0.1 else text


def test_random_bodies_are_refused_if_and_only_if_a_key_is_repeated() -> None:
    rng = random.Random(0)
    num_refused = 0
    for _ in range(5_000):
        body = written(rng, 0)
        repeated: list[bool] = []
        value = json.loads(
            body,
            object_pairs_hook=lambda pairs, found=repeated: found.append(len(dict(pairs)) < len(pairs)) or dict(pairs),
        )
        if not any(repeated):
            assert parse_json(body.encode()) == value
            continue
        num_refused += 1
        with pytest.raises(RequestError, match="given twice"):
            parse_json(body.encode())
    assert 500 < num_refused < 4_500


def test_a_huge_key_is_not_repeated_in_the_refusal() -> None:
    key = b'"' + b"k" * 100_000 + b'": 1'
    with pytest.raises(RequestError) as refusal:
        parse_json(b"{" + key + b"," + key + b"}")
    assert len(str(refusal.value)) < 300


def test_a_million_characters_of_picture_cost_little_more_than_a_plain_parser() -> None:
    picture = base64.b64encode(os.urandom(750_000)).decode()
    body = json.dumps({"question": "What is this?", "image_url": picture, "settings": {"temperature": 0}}).encode()
    assert least_cpu_s(lambda: parse_json(body), 5) < 10 * least_cpu_s(lambda: json.loads(body), 5)


def test_both_apis_refuse_it_with_400(client: httpx.Client) -> None:
    picture = json.dumps(SCENE_URL)
    native = f'{{"question": "Who?", "image_url": {picture}, "image_url": {picture}}}'.encode()
    for path, body, key in (("/v1/query", native, "image_url"), ("/v1/chat/completions", CHAT, "role")):
        response = client.post(path, content=body, headers=JSON)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == "body"
        assert f"'{key}' is given twice" in response.json()["error"]["message"]


@pytest.mark.parametrize("depth", [700, 1000, 1020, 5000])
def test_a_deep_body_is_read_or_refused(depth: int) -> None:
    body = b'{"a":' * depth + b"1" + b"}" * depth
    if depth == 700:
        assert isinstance(parse_json(body), dict)
        return
    with contextlib.suppress(RequestError):
        parse_json(body)
