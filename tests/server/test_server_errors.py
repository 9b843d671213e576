"""Refusals: status, shape, the field at fault, and nothing of the server's inside."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from kestrel.engine import InferenceEngine
from kestrel.errors import (
    AdapterGone,
    AdapterNotFound,
    AdapterSourceBusy,
    AdapterSourceDenied,
    AdapterSourceError,
    AdapterSourceTimeout,
    AdapterUnusable,
    CheckpointError,
    ContextTooLong,
    EngineStopped,
    NotAllowed,
    OutOfPages,
    QueueFull,
    RequestError,
)
from kestrel.server.errors import DeadlineExceeded, error_body, error_response
from tests.server.conftest import SCENE_URL, RunningServer
from tests.server.sockets import JSON


def refusal(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert response.json().keys() == {"error"}
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert not re.search(r"Traceback|0x[0-9a-f]{6}|\.py\b|/home|/usr|/tmp", error["message"])
    return error


@pytest.mark.parametrize(
    ("skill", "body", "param"),
    [
        ("query", {}, "question"),
        ("query", {"question": ""}, "question"),
        ("query", {"question": 5}, "question"),
        ("query", {"question": ["What?"]}, "question"),
        ("query", {"question": "What?", "reasoning": "yes"}, "reasoning"),
        ("query", {"question": "What?", "spatial_refs": [[0.5, 2]], "image_url": SCENE_URL}, "spatial_refs[0]"),
        ("query", {"question": "What?", "spatial_refs": [[0.5, 0.5]]}, "spatial_refs"),
        ("query", {"question": "What?", "settings": {"temperature": 2.1}}, "temperature"),
        ("query", {"question": "What?", "settings": {"top_p": -0.01}}, "top_p"),
        ("query", {"question": "What?", "settings": {"max_tokens": 0}}, "max_tokens"),
        ("query", {"question": "What?", "settings": {"max_tokens": 1.5}}, "max_tokens"),
        ("query", {"question": "What?", "settings": {"seed": 2**70}}, "seed"),
        ("query", {"question": "What?", "settings": {"colour": 1}}, "settings.colour"),
        ("query", {"question": "What?", "settings": [1]}, "settings"),
        ("query", {"question": "What?", "max_tokens": 5, "settings": {"max_tokens": 6}}, "max_tokens"),
        ("query", {"question": "What?", "colour": 1}, "colour"),
        ("query", {"question": "What?", "stream": "yes"}, "stream"),
        ("query", {"question": "What?", "stream": 1}, "stream"),
        ("query", {"question": "What?", "priority": "high"}, "priority"),
        ("query", {"question": "What?", "request_id": 5}, "request_id"),
        ("query", {"question": "What?", "request_id": "x" * 300}, "request_id"),
        ("query", {"question": "What?", "model": 5}, "model"),
        ("query", {"question": "What?", "tenant": "somebody"}, "tenant"),
        ("query", {"question": "What?", "skill": "caption"}, "skill"),
        ("query", {"question": "What?", "self": 1}, "self"),
        ("query", {"question": "What?", "image": "/etc/passwd"}, "image"),
        ("query", {"question": "What?", "image_url": "/etc/passwd"}, "image_url"),
        ("query", {"question": "What?", "image_url": "file:///etc/passwd"}, "image_url"),
        ("query", {"question": "What?", "image_url": "https://example.com/a.png"}, "image_url"),
        ("query", {"question": "What?", "image_url": {"url": SCENE_URL}}, "image_url"),
        ("caption", {}, "image_url"),
        ("caption", {"image_url": SCENE_URL, "length": "epic"}, "length"),
        ("point", {"image_url": SCENE_URL}, "object"),
        ("point", {"object": "bee"}, "image_url"),
        ("point", {"image_url": SCENE_URL, "object": "bee", "max_points": 0}, "max_points"),
        ("detect", {"image_url": SCENE_URL, "object": "bee", "settings": {"max_tokens": 5}}, "max_tokens"),
        ("segment", {"image_url": SCENE_URL, "object": ""}, "object"),
    ],
)
def test_a_bad_field_is_named(client: httpx.Client, skill: str, body: dict[str, Any], param: str) -> None:
    error = refusal(client.post(f"/v1/{skill}", json=body), 400)
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, None)
    assert error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize(
    "content",
    [b"", b"  ", b"{", b"[]", b'"text"', b"5", b"null", b'{"question": NaN}', b"\xff\xfe", b'{"question": "\\ud800"}',
     b"[" * 5000, b'{"a":' * 5000],
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_refused(client: httpx.Client, content: bytes) -> None:
    error = refusal(client.post("/v1/query", content=content, headers=JSON), 400)
    assert error["param"] == "body"


def test_form_data_is_no_json_object(client: httpx.Client) -> None:
    """As curl -d sends it; a skill takes the form that curl -F sends."""
    error = refusal(client.post("/v1/query", data={"question": "What?"}), 415)
    assert error["message"].endswith("or a form (with curl: -F question=… in place of -d question=…)")
    error = refusal(client.post("/v1/completions", data={"prompt": "What?"}), 415)
    assert error["message"].endswith("send JSON with Content-Type: application/json")


def test_another_model_is_not_found(client: httpx.Client) -> None:
    error = refusal(client.post("/v1/query", json={"question": "What?", "model": "moondream9"}), 404)
    assert error["code"] == "model_not_found"
    assert "kestrel-tiny" in error["message"]


@pytest.mark.parametrize(
    "naming",
    [
        {"settings": {"adapter": "01J5@1000"}},
        {"adapter": "01J5@1000"},
        {"variant": "01J5@1000"},
        {"model": "kestrel-tiny/01J5@1000"},
        {"model": "kestrel-tiny/01J5@1000", "settings": {"adapter": "01J5@1000"}},
    ],
)
def test_an_unknown_adapter_is_not_found_however_it_is_named(client: httpx.Client, naming: dict[str, Any]) -> None:
    error = refusal(client.post("/v1/query", json={"question": "What?", **naming}), 404)
    assert error["code"] == "adapter_not_found"
    assert "01J5@1000" in error["message"]


def test_two_different_adapters_are_a_contradiction(client: httpx.Client) -> None:
    body = {"question": "What?", "model": "kestrel-tiny/one@1", "settings": {"adapter": "two@2"}}
    refusal(client.post("/v1/query", json=body), 400)


def test_routes_that_do_not_exist_have_the_same_shape(client: httpx.Client) -> None:
    assert refusal(client.post("/v1/sing", json={}), 404)["code"] == "not_found"
    response = client.get("/v1/query")
    assert refusal(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("/v1/detct", "/v1/detect"),
        ("/query", "/v1/query"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/tokenize", "/tokenize"),
        ("/metric", "/metrics"),
        ("/doc", "/docs"),
        ("/docs.html", "/docs"),
        ("/swagger", "/docs"),
        ("/openapi", "/openapi.json"),
        ("/v1/embed", "/v1/embeddings"),
        ("/v1/chat/", "/v1/chat/completions"),
        ("/health_check", "/health"),
        ("/v1/detect/cow", "/v1/detect"),
        ("/V1/Query", "/v1/query"),
    ],
)
def test_an_unknown_route_points_to_the_nearest_one(client: httpx.Client, path: str, nearest: str) -> None:
    assert refusal(client.post(path, json={}), 404)["message"].endswith(f"; did you mean {nearest}?")
    assert refusal(client.post(path, files={"image": b""}), 404)["message"].endswith(f"; did you mean {nearest}?")


@pytest.mark.parametrize("path", ["/v1/sing", "/nothing/like/it", "/" + "v1/detect" * 1000])
def test_a_route_that_is_like_no_other_points_to_none(client: httpx.Client, path: str) -> None:
    assert "did you mean" not in refusal(client.post(path, json={}), 404)["message"]


@pytest.mark.parametrize(("method", "path", "right"), [("GET", "/v1/query", "POST"), ("POST", "/v1/models", "GET")])
def test_a_wrong_method_is_told_the_right_one(client: httpx.Client, method: str, path: str, right: str) -> None:
    message = refusal(client.request(method, path, json={}), 405)["message"]
    assert message == f"this route does not take {method!r}; send {right}"


def test_an_unexpected_failure_says_nothing_and_harms_nobody(
    server: RunningServer, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("secret of /home/me")

    monkeypatch.setattr(InferenceEngine, "run", broken)
    error = refusal(client.post("/v1/query", json={"question": "What?"}), 500)
    assert error["code"] == "internal_error"
    assert "secret" not in error["message"]
    monkeypatch.undo()
    assert client.post("/v1/query", json={"question": "What?", "max_tokens": 1}).status_code == 200
    assert server.state.ready


@pytest.mark.parametrize(
    ("error", "status", "code", "retries"),
    [
        (RequestError("top_p", "is odd"), 400, None, False),
        (ContextTooLong("prompt", "is long"), 400, "context_length_exceeded", False),
        (NotAllowed("priority", "is low"), 403, "not_allowed", False),
        (AdapterNotFound("adapter x"), 404, "adapter_not_found", False),
        (AdapterGone("adapter x"), 410, "adapter_gone", False),
        (AdapterUnusable("adapter x"), 400, "adapter_unusable", False),
        (AdapterSourceError("adapter x"), 502, "adapter_source_failed", False),
        (AdapterSourceDenied("adapter x"), 502, "adapter_source_denied", False),
        (AdapterSourceBusy("adapter x"), 503, "adapter_source_busy", True),
        (AdapterSourceTimeout("adapter x"), 504, "adapter_source_timeout", False),
        (QueueFull("full"), 503, "overloaded", True),
        (OutOfPages("none left"), 503, "overloaded", True),
        (EngineStopped("RuntimeError: CUDA at 0x7f0012345678"), 503, "engine_stopped", True),
        (DeadlineExceeded("late"), 408, "deadline_exceeded", False),
        (CheckpointError("/models/secret/model.pt is damaged"), 500, "internal_error", False),
        (OSError("/etc/passwd"), 500, "internal_error", False),
    ],
)
def test_the_table_of_errors(error: Exception, status: int, code: str | None, retries: bool) -> None:
    response = error_response(error)
    assert (response.status_code, error_body(error)["error"]["code"]) == (status, code)
    assert ("retry-after" in response.headers) == retries
    assert not re.search(rb"0x|/models|/etc", bytes(response.body))


def test_a_library_s_print_of_an_object_does_not_reach_a_client() -> None:
    error = RequestError("image", "cannot identify image file <_io.BytesIO object at 0x7f28ee93d6c0>")
    assert error_body(error)["error"]["message"] == "image: cannot identify image file the data"


def test_a_misspelt_model_gets_a_suggestion(client: httpx.Client) -> None:
    response = client.post("/v1/query", json={"question": "Who?", "model": "kestrel-tyni"})
    assert response.status_code == 404
    assert response.json()["error"]["message"].endswith("did you mean 'kestrel-tiny'?")
