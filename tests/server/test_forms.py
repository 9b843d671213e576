"""Forms on the routes of the skills: they say what JSON says, and what is wrong is told by the field's name."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from kestrel.server.forms import MAX_PARTS, _Parts
from kestrel.server.json_body import LARGE_BODY_BYTES
from kestrel.server.native import NATIVE_SKILLS
from tests.peak_memory import least_peak_bytes
from tests.server.conftest import GREEDY, SCENE_BYTES, SCENE_URL, RunningServer
from tests.server.sockets import eventually

PICTURE = ("scene.png", SCENE_BYTES)
KIND = {"content-type": "multipart/form-data; boundary=line"}
OWN_OF_EACH_CALL = {
    "request_id",
    "metrics",
    "processing_latency_s",
    "ttft_s",
    "decode_latency_s",
    "decode_tokens_per_s",
}


def part(name: str, value: bytes = b"", further: str = "") -> bytes:
    return f'--line\r\nContent-Disposition: form-data; name="{name}"{further}\r\n\r\n'.encode() + value + b"\r\n"


END = b"--line--\r\n"
FILE = '; filename="a;\\"b.png"\r\nContent-Type: image/png'


def refusal(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    return response.json()["error"]


def post(client: httpx.Client, *parts: bytes, path: str = "/v1/detect") -> httpx.Response:
    return client.post(path, content=b"".join(parts), headers=KIND)


@pytest.mark.parametrize(
    ("skill", "fields"),
    [
        ("query", {"question": "5", "settings": {**GREEDY, "max_tokens": 4}, "reasoning": False}),
        ("caption", {"length": "short", "max_tokens": 4}),
        ("point", {"object": ["bee", "dog"], "max_points": 2}),
        ("detect", {"object": "bee", "request_id": "7", "model": None}),
        ("segment", {"object": "red cross", "spatial_refs": [[0.5, 0.5]], "max_tokens": 8}),
    ],
)
def test_a_form_is_answered_as_the_same_fields_in_json(
    client: httpx.Client, skill: str, fields: dict[str, Any]
) -> None:
    told = client.post(f"/v1/{skill}", json={"image_url": SCENE_URL, **fields})
    form = {
        name: value if isinstance(value, (str, list)) and name != "spatial_refs" else json.dumps(value)
        for name, value in fields.items()
        if value is not None
    }
    answer = client.post(f"/v1/{skill}", data=form, files={"image": PICTURE})
    assert (told.status_code, answer.status_code) == (200, 200), answer.text
    told, answer = told.json(), answer.json()
    assert answer.keys() == told.keys()
    assert {name: answer[name] for name in answer.keys() - OWN_OF_EACH_CALL} == {
        name: told[name] for name in told.keys() - OWN_OF_EACH_CALL
    }
    assert answer["metrics"]["input_tokens"] == told["metrics"]["input_tokens"]
    assert fields.get("request_id", answer["request_id"]) == answer["request_id"]


def test_a_form_may_ask_for_a_stream_and_give_the_picture_as_text(client: httpx.Client) -> None:
    form = {"image_url": SCENE_URL, "object": "bee", "stream": "true"}
    response = client.post("/v1/detect", files=[(name, (None, value)) for name, value in form.items()])
    assert response.headers["content-type"].startswith("text/event-stream")
    assert '"completed":true' in response.text


IMAGE, OBJECT = part("image", SCENE_BYTES, FILE), part("object", b"bee")


@pytest.mark.parametrize(
    ("parts", "field", "told"),
    [
        ([IMAGE, part("object", b"bee", FILE)], "object", "is a file"),
        ([part("image", b"photo.jpg"), OBJECT], "image", "image=@photo.jpg"),
        ([IMAGE, IMAGE, OBJECT], "image", "is given twice"),
        ([IMAGE, OBJECT, part("image_url", SCENE_URL.encode())], "image", "next to image_url"),
        ([part("image", b"", FILE), OBJECT], "image", "is an empty file"),
        ([part("image", b"no picture", FILE), OBJECT], "image", "picture"),
        ([OBJECT], "image", "is required"),
        ([IMAGE], "object", "is required"),
        (
            [IMAGE, OBJECT, part("colour", b"red")],
            "colour",
            "known fields: adapter, allowed_ids, cache_salt, image, image_url",
        ),
        ([IMAGE, OBJECT, part("stream", b"True")], "stream", "must be true or false (got 'True')"),
        ([IMAGE, OBJECT, part("temperature", b"abc")], "temperature", "must be a number (got 'abc')"),
        ([IMAGE, OBJECT, part("settings", b"{temperature: 1}")], "settings", "is not JSON"),
        ([IMAGE, OBJECT, part("temperature", b"")], "temperature", "is empty; write its value as in a JSON body"),
        ([IMAGE, OBJECT, part("settings", b'{"top_k": 1, "top_k": 2}')], "settings", "given twice"),
        ([IMAGE, OBJECT, part("seed", b"1"), part("seed", b"2")], "seed", "is given 2 times"),
        ([IMAGE, OBJECT, part("model", b"a"), part("model", b"b")], "model", "is given 2 times"),
        ([IMAGE, part("object", b"\xff")], "object", "UTF-8"),
        ([IMAGE, part("object", b"YmVl", "\r\nContent-Transfer-Encoding: base64")], "object", "base64"),
        ([part("", b"bee")], "body", "part 1 has no name"),
        ([IMAGE, part("object", b"bee", '; name="colour"')], "body", "part 2 has no name, or two"),
        ([OBJECT, part("stop", b"x"), part("object", b"x" * LARGE_BODY_BYTES)], "object", "the form's texts"),
        ([IMAGE, part("object", b"x" * LARGE_BODY_BYTES), part("model", b"m")], "model", "the form's texts"),
        ([OBJECT] * (MAX_PARTS + 1), "body", "parts"),
        ([part("x" * 5000)], "body", "a head of more than"),
    ],
)
def test_a_wrong_part_is_refused_by_its_name(client: httpx.Client, parts: list[bytes], field: str, told: str) -> None:
    error = refusal(post(client, *parts, END))
    assert (error["param"], told in error["message"]) == (field, True), error


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "is not a form"),
        (b"{}", "is not a form"),
        (IMAGE.replace(b"--line", b"--lime"), "is not a form"),
        (IMAGE + OBJECT, "cut short"),
        (IMAGE[: len(IMAGE) // 2], "cut short"),
        (IMAGE + b"--line", "cut short"),
        (IMAGE + b"--line\r\nContent-Dis", "cut short"),
        (IMAGE + b"--liner\r\n" + END, "broken"),
    ],
)
def test_a_form_that_is_not_whole_is_refused(client: httpx.Client, body: bytes, told: str) -> None:
    error = refusal(post(client, body))
    assert (error["param"], told in error["message"]) == ("body", True), error


def test_a_picture_over_the_limit_is_refused_before_the_rest_is_read(
    client: httpx.Client, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(server.engine.config), "max_image_bytes", 1000)
    error = refusal(post(client, part("image", bytes(1001), FILE), b"no more of a form"))
    assert error["param"] == "image"
    assert "exceeds 1000 bytes (max_image_bytes)" in error["message"]
    assert refusal(client.post("/v1/detect", files={"image": bytes(33 * 2**20)}), 413)["code"] == "body_too_large"
    assert eventually(lambda: server.state.pending_body_bytes == 0)


@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
def test_a_form_is_read_in_pieces_of_any_size(size: int) -> None:
    picture = b"\r\n--lin\r\n-\r\n--\r\r\n" * 3
    body = b"preamble\r\n" + part("object", b"a") + part("image", picture, FILE) + part("object", b"") + END + b"after"
    parts = _Parts(b"line", 1000)
    for at in range(0, len(body), size):
        parts.feed(body[at : at + size])
    parts.require_end()
    assert parts.texts == {"object": [b"a", b""]}
    assert parts.take_picture() == picture


def test_a_picture_is_held_once() -> None:
    num_bytes, piece = 8 * 2**20, bytes(2**16)

    def read() -> None:
        parts = _Parts(b"line", num_bytes)
        parts.feed(part("image", further=FILE).removesuffix(b"\r\n"))
        for _ in range(num_bytes // len(piece)):
            parts.feed(piece)
        parts.feed(b"\r\n" + END)
        assert len(parts.take_picture()) == num_bytes

    assert least_peak_bytes(read) < 1.5 * num_bytes


def test_every_other_route_refuses_forms_and_says_where_they_go(client: httpx.Client, server: RunningServer) -> None:
    skills = {f"/v1/{skill.name}" for skill in NATIVE_SKILLS}
    others = {path for path, methods in server.app.openapi()["paths"].items() if "post" in methods} - skills
    assert "/v1/chat/completions" in others
    for path in others:
        error = refusal(post(client, OBJECT, END, path=path), 415)
        # Anthropic's errors have no code.
        assert path.startswith("/v1/messages") or error["code"] == "unsupported_content_type"
        assert all(skill in error["message"] for skill in skills)


def test_pages_of_other_sites_may_not_send_forms(server: RunningServer) -> None:
    for origin in ("https://evil.example", "null"):
        with server.client(headers={"origin": origin}) as page:
            assert refusal(post(page, IMAGE, OBJECT, END), 403)["code"] == "origin_not_allowed"


def test_forms_are_described_field_by_field(server: RunningServer) -> None:
    for skill in NATIVE_SKILLS:
        content = server.app.openapi()["paths"][f"/v1/{skill.name}"]["post"]["requestBody"]["content"]
        described, as_json = (content[kind]["schema"] for kind in ("multipart/form-data", "application/json"))
        assert described["properties"].keys() == {"image", *as_json["properties"]}
        assert "contentSchema" in described["properties"]["settings"]
        assert "contentSchema" not in described["properties"].get("object", {})
