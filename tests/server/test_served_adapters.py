"""Adapters over HTTP: every way to name one, the list of models, refusals, and what metrics say."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kestrel.server.config import ServerConfig
from tests.engine.conftest import GOLDENS, cases
from tests.engine.random_adapters import write_adapters
from tests.server.conftest import RunningServer, data_url, runtime_config, start_server

CASE = cases("md2")["lora_query_small"]
PICTURE = data_url((GOLDENS / "image_small.png").read_bytes())
ASKED = {"image_url": PICTURE, "question": CASE["question"], "reasoning": False}
SETTINGS = {"temperature": 0.0, "max_tokens": CASE["settings"]["max_tokens"]}
EXPECTED = CASE["output"]["answer"]
NAME = "house/variant"
"""A served model name may have a slash of its own."""


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("adapters")
    shutil.copy(GOLDENS / "md2" / "lora_variant.safetensors", folder / "cats@12.safetensors")
    write_adapters(folder, "md2", 1)
    (folder / "torn.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    config = runtime_config(model_path=GOLDENS / "md2", adapter_dir=folder, max_adapters=2, kv_cache_pages=300)
    yield from start_server(ServerConfig(port=0, served_model_names=(NAME,)), config)


@pytest.fixture
def http(tuned: RunningServer) -> Iterator[httpx.Client]:
    with tuned.client() as client:
        yield client


def query(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/query", json={**ASKED, "settings": SETTINGS, **fields})


@pytest.mark.parametrize(
    "named",
    [
        {"settings": {**SETTINGS, "adapter": "cats@12"}},
        {"adapter": "cats@12"},
        {"variant": "cats@12"},
        {"model": f"{NAME}/cats@12"},
    ],
    ids=["settings", "adapter", "variant", "model"],
)
def test_every_way_to_name_an_adapter_gives_the_answer_of_the_reference(
    http: httpx.Client, named: dict[str, Any]
) -> None:
    response = query(http, **named)
    assert response.status_code == 200, response.text
    assert response.json()["answer"] == EXPECTED
    assert query(http).json()["answer"] != EXPECTED


def test_chat_finds_an_adapter_behind_the_name_of_the_model(http: httpx.Client) -> None:
    content = [{"type": "image_url", "image_url": {"url": PICTURE}}, {"type": "text", "text": CASE["question"]}]
    body = {"messages": [{"role": "user", "content": content}], **SETTINGS}
    answers = [
        http.post("/v1/chat/completions", json={"model": name, **body}).json() for name in (f"{NAME}/cats@12", NAME)
    ]
    adapted, base = (answer["choices"][0]["message"]["content"] for answer in answers)
    assert adapted == EXPECTED
    assert base != EXPECTED
    assert answers[0]["model"] == f"{NAME}/cats@12"


def test_adapters_are_listed_as_models(http: httpx.Client) -> None:
    cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    assert {f"{NAME}/cats@12", f"{NAME}/a0", NAME} <= set(cards)
    assert cards[f"{NAME}/a0"]["parent"] == NAME
    assert cards[NAME]["parent"] is None
    assert http.get(f"/v1/models/{NAME}/a0").json() == cards[f"{NAME}/a0"]
    missing = http.get(f"/v1/models/{NAME}/nobody")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"
    alone = http.post("/v1/chat/completions", json={"model": "cats@12", "messages": [{"role": "user", "content": "?"}]})
    assert f"use '{NAME}' ({NAME}/NAME for an adapter)" in alone.json()["error"]["message"]


@pytest.mark.parametrize(
    ("adapter", "status", "code"),
    [
        ("nobody", 404, "adapter_not_found"),
        ("cats@13", 404, "adapter_not_found"),
        ("torn", 400, "adapter_unusable"),
        ("../cats@12", 400, None),
        ("", 400, None),
        (7, 400, None),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    http: httpx.Client, adapter: object, status: int, code: str | None
) -> None:
    response = query(http, adapter=adapter)
    error = response.json()["error"]
    assert response.status_code == status, response.text
    assert "adapter" in error["message"]
    assert "/" not in error["message"].replace("cats@12", "").replace("../", "")
    if code is not None:
        assert error["code"] == code


def test_metrics_count_requests_by_adapter_and_name_the_slots(http: httpx.Client) -> None:
    def counted() -> dict[str, float]:
        families = {f.name: f for f in text_string_to_metric_families(http.get("/metrics").text)}
        info = families["vllm:lora_requests_info"].samples[0].labels
        assert info["max_lora"] == "2"
        assert info["running_lora_adapters"] == info["waiting_lora_adapters"] == ""
        by_adapter = families["kestrel_adapter_requests_finished"].samples
        loads = families["kestrel_adapter_loads"].samples[0].value
        return {s.labels["adapter"]: s.value for s in by_adapter if s.name.endswith("_total")} | {"loads": loads}

    assert query(http, adapter="a0").status_code == 200
    before = counted()
    for _ in range(3):
        assert query(http, settings={**SETTINGS, "adapter": "a0"}).status_code == 200
    query(http, adapter="nobody")
    query(http)
    after = counted()
    assert after["a0"] - before["a0"] == 3
    assert "nobody" not in after
    assert after["loads"] == before["loads"]
