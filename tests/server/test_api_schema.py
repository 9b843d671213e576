"""The real server against its own description: generated requests, valid and not, to every route it lists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from kestrel.server.api_docs import current_document
from kestrel.server.config import ServerConfig
from kestrel.server.errors import ERROR_KINDS
from kestrel.server.native import NATIVE_SKILLS
from kestrel.server.records import MESSAGES_PATH
from kestrel.server.schemas import TINY_PICTURE
from tests.server.conftest import GREEDY, SCENE_URL, RunningServer, runtime_config, start_server
from tests.server.pages import Page

ROOT = Path(__file__).parents[2]
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)
PHASES = "examples,fuzzing"
"""Not "coverage": thousands of requests at the bounds of every field are for runs by hand."""
MAX_EXAMPLES = 20
METHODS = {"get", "put", "post", "delete", "patch"}


@pytest.fixture(scope="module")
def described() -> Iterator[RunningServer]:
    """Answers are short, or end with 408."""
    config = ServerConfig(port=0, default_max_new_tokens=4, request_timeout_s=10.0)
    yield from start_server(config, runtime_config(max_batch_size=8))


def operations(schema: dict[str, Any]) -> list[tuple[str, str]]:
    return [(path, method) for path, item in schema["paths"].items() for method in item if method in METHODS]


@pytest.mark.exhaustive
def test_generated_requests_find_no_fault_in_any_route(described: RunningServer, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{described.url}/openapi.json"]
    bounds = ["--max-examples", str(MAX_EXAMPLES), "--request-timeout", "60", "--workers", "1"]
    how = ["--phases", PHASES, "--checks", ",".join(CHECKS), "--seed", "1", "--no-color"]
    hooks = {"SCHEMATHESIS_HOOKS": "tests.server.schema_hooks", "PYTHONPATH": str(ROOT), "TEST_PICTURE": TINY_PICTURE}
    told = subprocess.run(
        [*command, *bounds, *how],
        cwd=tmp_path,
        env={**os.environ, **hooks},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert told.returncode == 0, told.stdout[-8000:] + told.stderr[-2000:]
    with described.client() as client:
        listed = operations(client.get("/openapi.json").json())
        page = Page(client.get("/metrics").text)
    tested = re.search(r"Tested: (\d+)", told.stdout)
    assert tested is not None
    assert int(tested[1]) == len(listed)
    answered, refused = (
        [page.total("kestrel_http_requests_total", route=f"/v1/{skill.name}", status=status) for skill in NATIVE_SKILLS]
        for status in ("200", "400")
    )
    assert all(refused)
    # By chance all bodies for a skill can name a picture, model, key or adapter that is not there.
    assert sum(map(bool, answered)) >= 3, answered
    assert described.state.running == {}


def test_every_operation_declares_its_answers_and_refusals(described: RunningServer) -> None:
    schema = described.app.openapi()
    for path, method in operations(schema):
        responses = schema["paths"][path][method]["responses"]
        assert "200" in responses, path
        if method == "post":
            full = "529" if path.startswith(MESSAGES_PATH) else "503"
            assert {"400", "401", "404", "408", "413", "429", full} <= responses.keys(), path
            body = schema["paths"][path][method]["requestBody"]["content"]["application/json"]["schema"]
            Draft202012Validator.check_schema(body)
            assert body["properties"], path


USER = {"role": "user", "content": "Who?"}
LOOK = {"type": "function", "name": "look"}
PICTURE_PART = {"type": "input_image", "image_url": TINY_PICTURE}


def _colourful(kind: str) -> dict[str, Any]:
    return {"type": kind, "text": "Who?", "colour": "red"}


def _thought(kind: str) -> dict[str, Any]:
    return {"type": kind, "thinking": "Who?"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": "Who?", "colour": "red"}]}),
        (
            "/v1/messages",
            {"max_tokens": 1, "messages": [{"role": "user", "content": "Who?"}], "thinking": {"type": "a"}},
        ),
        ("/v1/responses", {"input": [{"role": "user", "content": "Who?", "colour": "red"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Who?"}], "best_of": 0}),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [_colourful("text")]}]}),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [_thought("thinking")]}, USER]}),
        ("/v1/messages", {"max_tokens": 1, "messages": [USER], "tool_choice": {"type": "auto", "name": "look"}}),
        ("/v1/messages", {"max_tokens": 1.5, "messages": [USER]}),
        ("/v1/responses", {"input": [{"role": "user", "content": [_colourful("input_text")]}]}),
        ("/v1/responses", {"input": [{"role": "assistant", "content": [PICTURE_PART]}, USER]}),
        ("/v1/responses", {"input": "Who?", "text": {"format": _colourful("text")}}),
        ("/v1/responses", {"input": "Who?", "text": {"colour": "red"}}),
        ("/v1/responses", {"input": "Who?", "tools": [{"type": "function", "name": "look", "colour": "red"}]}),
        ("/v1/responses", {"input": "Who?", "tools": [{**LOOK, "parameters": {"type": "string"}}]}),
        ("/v1/chat/completions", {"messages": [USER], "structured_outputs": {"colour": "red"}}),
        ("/v1/chat/completions", {"messages": [USER], "structured_outputs": {"disable_any_whitespace": True}}),
        ("/v1/chat/completions", {"messages": [USER], "response_format": {"type": "regex"}}),
        ("/v1/chat/completions", {"messages": [USER], "guided_choice": [""]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": None}]}),
        ("/v1/embeddings", {"input": " "}),
        ("/tokenize", {"prompt": None}),
        ("/tokenize", {"prompt": "Who?", "add_generation_prompt": True}),
    ],
)
def test_what_is_refused_is_against_the_schema(described: RunningServer, path: str, body: dict[str, Any]) -> None:
    schema = described.app.openapi()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert not Draft202012Validator(schema).is_valid(body)
    with described.client() as client:
        assert client.post(path, json=body).status_code == 400


WHOLE = {"max_tokens": 2.0, "seed": 7.0}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}], "n": 2.0, **WHOLE}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": []}], "reasoning": {"enabled": None}}),
        ("/v1/chat/completions", {"messages": [USER], "structured_outputs": {"regex": "a+", "json": None}}),
        ("/v1/completions", {"prompt": [5.0, 6], "echo": True, **WHOLE}),
        ("/v1/completions", {"prompt": [[5.0], [6]], "priority": 1.0, **WHOLE}),
        ("/v1/embeddings", {"input": [5.0, 6]}),
        ("/v1/embeddings", {"input": [{"type": "text", "text": ""}, {"type": "image_url", "image_url": TINY_PICTURE}]}),
        ("/detokenize", {"tokens": [5.0, 6]}),
        ("/v1/responses", {"input": "", "max_output_tokens": 2.0}),
        ("/v1/messages", {"max_tokens": 2.0, "messages": [{"role": "user", "content": " "}], "top_k": 5.0}),
        ("/v1/messages", {"max_tokens": 2, "messages": [USER], "thinking": {"type": "enabled", "budget_tokens": 9.0}}),
        ("/v1/query", {"question": "Who?", "settings": WHOLE}),
        ("/v1/detect", {"object": "bee", "image_url": TINY_PICTURE, "max_objects": 1.0}),
    ],
)
def test_blanks_and_whole_numbers_with_a_point_are_taken_as_the_schema_says(
    described: RunningServer, path: str, body: dict[str, Any]
) -> None:
    schema = described.app.openapi()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    Draft202012Validator(schema).validate(body)
    with described.client() as client:
        response = client.post(path, json=body)
    assert response.status_code == 200, response.text


def test_a_seed_with_a_point_is_the_same_seed(described: RunningServer) -> None:
    body = {"prompt": "A", "n": 2, "temperature": 2.0, "max_tokens": 4}
    with described.client() as client:
        texts = [
            [choice["text"] for choice in client.post("/v1/completions", json={**body, "seed": seed}).json()["choices"]]
            for seed in (7, 7.0)
        ]
    assert texts[0] == texts[1]


def test_every_status_that_clients_get_is_declared(described: RunningServer) -> None:
    """499 has no receiver: the client is gone or cancelled the request itself."""
    declared = {int(status) for status in described.app.openapi()["paths"]["/v1/query"]["post"]["responses"]}
    assert {kind.status for _, kind in ERROR_KINDS} - {499} <= declared


@pytest.mark.parametrize("skill", [skill.name for skill in NATIVE_SKILLS])
def test_every_described_field_is_known_to_the_skill(described: RunningServer, skill: str) -> None:
    schema = described.app.openapi()["paths"][f"/v1/{skill}"]["post"]["requestBody"]["content"]["application/json"]
    properties = schema["schema"]["properties"]
    valid = {"question": "Who?", "object": "bee", "image_url": TINY_PICTURE}
    base = {name: value for name, value in valid.items() if name in schema["schema"]["required"]}
    with described.client() as client:
        for name in properties:
            response = client.post(f"/v1/{skill}", json={**base, name: {"no": ["such", "value"]}})
            assert response.status_code == 400, name
            assert "is not a field" not in response.text, name
        for name in properties["settings"]["properties"]:
            response = client.post(f"/v1/{skill}", json={**base, "settings": {name: {"no": ["such", "value"]}}})
            assert response.status_code == 400, name
            assert "is not a setting" not in response.text, name
            assert "leave it out" not in response.text, name
        unknown = client.post(f"/v1/{skill}", json={**base, "colour": 1}).json()["error"]
    assert unknown["param"] == "colour"
    known = set(re.findall(r"\w+", unknown["message"].split("known fields: ")[1]))
    assert known == properties.keys()


@pytest.mark.parametrize(
    ("skill", "fields"),
    [
        ("query", {"question": "How many bees are there?", "reasoning": True, "settings": {**GREEDY, "logprobs": 2}}),
        ("caption", {"length": "short"}),
        ("point", {"object": "bee"}),
        ("detect", {"object": "bee"}),
        ("segment", {"object": "red cross"}),
    ],
)
def test_a_full_answer_is_as_described(server: RunningServer, skill: str, fields: dict[str, Any]) -> None:
    schema = server.app.openapi()["paths"][f"/v1/{skill}"]["post"]
    body = {"image_url": SCENE_URL, **fields}
    Draft202012Validator(schema["requestBody"]["content"]["application/json"]["schema"]).validate(body)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        answer = client.post(f"/v1/{skill}", json=body).json()
    Draft202012Validator(schema["responses"]["200"]["content"]["application/json"]["schema"]).validate(answer)


def test_the_api_document_is_up_to_date() -> None:
    """If not: python -m kestrel.server.api_docs docs/api.md"""
    written = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert written == current_document()


def test_the_api_document_names_every_field_of_every_route(described: RunningServer) -> None:
    document, schema = current_document(), described.app.openapi()
    for path, method in operations(schema):
        section = document.split(f"## {method.upper()} {path}\n")[1].split("\n## ")[0]
        operation = schema["paths"][path][method]
        body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
        answer = operation["responses"]["200"]["content"].get("application/json", {}).get("schema", {})
        fields = [*body.get("properties", {}), *answer.get("properties", {})]
        assert [name for name in fields if f"`{name}`" not in section] == []
