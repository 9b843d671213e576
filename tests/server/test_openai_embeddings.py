"""Embeddings, models and tokens: what a client gets is what the engine has."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kestrel.server.config import ServerConfig
from tests.scene import SCENE
from tests.server.conftest import SCENE_URL, RunningServer, runtime_config, start_server

PICTURE = {"type": "image_url", "image_url": {"url": SCENE_URL}}


def embed(client: httpx.Client, value: Any, **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/embeddings", json={"model": "kestrel-tiny", "input": value, **fields})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert [(one["object"], one["index"]) for one in answer["data"]] == [
        ("embedding", index) for index in range(len(answer["data"]))
    ]
    return answer


def vectors(client: httpx.Client, value: Any, **fields: Any) -> list[list[float]]:
    return [one["embedding"] for one in embed(client, value, **fields)["data"]]


def test_every_form_of_input_gives_the_engines_vector(client: httpx.Client, server: RunningServer) -> None:
    direct = server.on_loop(lambda: server.engine.embed(text="a brown bee"))
    truth = pytest.approx(direct.output["embedding"], abs=1e-5)
    ids = server.engine.profile.tokenizer.encode("a brown bee")
    for value in ("a brown bee", ["a brown bee"], ids, [ids], [{"type": "text", "text": "a brown bee"}]):
        assert vectors(client, value) == [truth]
    several = embed(client, ["a brown bee", ids, "a star"])
    assert several["data"][0]["embedding"] == truth
    assert several["data"][1]["embedding"] == truth
    assert several["data"][2]["embedding"] != truth
    assert several["usage"]["prompt_tokens"] == several["usage"]["total_tokens"] > 2 * direct.metrics.input_tokens


def test_a_picture_has_a_vector_with_or_without_words(client: httpx.Client, server: RunningServer) -> None:
    alone = server.on_loop(lambda: server.engine.embed(SCENE)).output["embedding"]
    with_words = server.on_loop(lambda: server.engine.embed(SCENE, "a bee")).output["embedding"]
    both = vectors(client, [[PICTURE], [PICTURE, {"type": "text", "text": "a bee"}]])
    assert both == [pytest.approx(alone, abs=1e-5), pytest.approx(with_words, abs=1e-5)]


def test_crops_of_pictures_are_bounded_and_words_have_none(client: httpx.Client) -> None:
    alone = vectors(client, [[PICTURE]])
    assert vectors(client, [[PICTURE], "a cat"], max_crops=1)[0] == pytest.approx(alone[0], abs=1e-5)  # it has one crop
    refused = client.post("/v1/embeddings", json={"input": ["a cat"], "max_crops": 1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_crops")


def test_base64_is_the_same_vector_in_little_endian_floats(client: httpx.Client) -> None:
    (plain,) = vectors(client, "a bee", encoding_format="float", dimensions=None)
    (packed,) = vectors(client, "a bee", encoding_format="base64", dimensions=len(plain))
    data = base64.b64decode(packed)
    assert list(struct.unpack(f"<{len(plain)}f", data)) == pytest.approx(plain, abs=1e-6)
    assert math.hypot(*plain) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("name", "value", "harmless"),
    [
        ("truncate_prompt_tokens", 5, None),
        ("normalize", False, True),
        ("add_special_tokens", False, True),
        ("messages", [{"role": "user", "content": "a bee"}], None),
        ("embed_dtype", "float16", "float32"),
        ("endianness", "big", "little"),
        ("cache_salt", "", "mine"),
    ],
)
def test_wishes_of_other_servers_are_met_or_refused_by_name(
    client: httpx.Client, name: str, value: Any, harmless: Any
) -> None:
    response = client.post("/v1/embeddings", json={"input": "a bee", name: value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)
    assert vectors(client, "a bee", **{name: harmless}) == vectors(client, "a bee")


@pytest.fixture(scope="module")
def renamed() -> Iterator[RunningServer]:
    yield from start_server(ServerConfig(port=0, served_model_names=("my-model",)), runtime_config())


def test_the_model_is_listed_by_all_its_names(renamed: RunningServer) -> None:
    with renamed.client() as client:
        models = client.get("/v1/models").json()
        assert models["object"] == "list"
        assert [model["id"] for model in models["data"]] == ["my-model", "kestrel-tiny"]
        for model in models["data"]:
            assert model["max_model_len"] == renamed.engine.max_model_length
            assert (model["object"], model["root"]) == ("model", "kestrel-tiny")
            assert client.get(f"/v1/models/{model['id']}").json() == model
            body = {"model": model["id"], "messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 1}
            assert client.post("/v1/chat/completions", json=body).json()["model"] == "my-model"
        assert client.get("/v1/models/other").json()["error"]["code"] == "model_not_found"
        assert client.get("/v1/models/my-model/01J5@100").status_code == 404


def test_tokens_are_those_of_completions(client: httpx.Client, server: RunningServer) -> None:
    text = "Who are you? <|endoftext|> 牛"
    answer = client.post("/tokenize", json={"prompt": text}).json()
    bare = client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    assert bare["tokens"] == server.engine.profile.tokenizer.encode(text)
    assert answer["tokens"] == [server.engine.profile.bos, *bare["tokens"]]
    assert server.engine.profile.end_id not in bare["tokens"]
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == server.engine.max_model_length
    completed = client.post("/v1/completions", json={"prompt": text, "max_tokens": 1}).json()
    assert completed["usage"]["prompt_tokens"] == answer["count"]
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}


def test_tokens_of_messages_are_those_of_a_chat(client: httpx.Client) -> None:
    asked = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]}
    ids = client.post("/tokenize", json=asked).json()["tokens"]
    chat, raw = ("/v1/chat/completions", asked), ("/v1/completions", {"prompt": ids})
    answers = [client.post(path, json={**body, "max_tokens": 5, "temperature": 0}).json() for path, body in (chat, raw)]
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"] == len(ids)
    assert answers[0]["choices"][0]["message"]["content"] == answers[1]["choices"][0]["text"]


def test_special_ids_can_be_found_by_their_names(client: httpx.Client, server: RunningServer) -> None:
    """The way lm-eval's remote tokenizer does it."""
    info = client.get("/tokenizer_info").json()
    for name, token_id in (("eos", server.engine.profile.end_id), ("bos", server.engine.profile.bos)):
        body = {"prompt": info[f"{name}_token"], "add_special_tokens": False}
        assert client.post("/tokenize", json=body).json()["tokens"] == [token_id] == [info[f"{name}_token_id"]]
    assert info["vocab_size"] == server.engine.vocab_size
