"""Health, readiness, version, ids; starting, failing, and a worker that dies."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import jsonschema
import pytest
import yaml

from kestrel import __version__
from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.errors import CheckpointError
from kestrel.server.config import ServerConfig
from kestrel.server.facts import MODEL_INFO, SERVER_INFO
from kestrel.server.http import create_app
from kestrel.server.state import app_state
from tests.moondream.coarse import EMBEDDED, coarse_folder
from tests.server.conftest import RunningServer, runtime_config, start_server
from tests.server.long_request import end_id_of, long_query
from tests.server.sockets import JSON, eventually, send


@pytest.mark.parametrize("path", ["/healthz", "/health", "/ready", "/readyz"])
def test_a_server_that_has_started_is_healthy_and_ready(client: httpx.Client, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 200
    assert response.json() == {"status": "ready", "model": "kestrel-tiny"}
    assert client.head(path).status_code == 200


def test_version_names_the_program_and_the_model(client: httpx.Client) -> None:
    assert client.get("/version").json() == {"version": __version__, "model": "kestrel-tiny"}


def test_every_response_has_an_id(client: httpx.Client) -> None:
    ids = [client.get("/ready").headers["x-request-id"] for _ in range(3)]
    ids.append(client.get("/nowhere").headers["x-request-id"])
    assert len(set(ids)) == 4
    assert all(re.fullmatch(r"[0-9a-f]{32}", value) for value in ids)


def test_a_sane_id_of_the_client_is_kept_and_another_is_replaced(client: httpx.Client) -> None:
    def sent(value: bytes) -> str:
        return client.get("/ready", headers=[(b"x-request-id", value)]).headers["x-request-id"]

    assert sent(b"order-66:a.b_c") == "order-66:a.b_c"
    for hostile in (b"", b"a b", b"x" * 129, b"<script>", "ä".encode()):
        assert re.fullmatch(r"[0-9a-f]{32}", sent(hostile))


def test_one_id_on_several_requests_at_once_is_no_clash(server: RunningServer) -> None:
    async def several() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            body = {"question": "Who are you?", "max_tokens": 3}
            calls = [client.post("/v1/query", json=body, headers={"x-request-id": "same"}) for _ in range(4)]
            return await asyncio.gather(*calls)

    responses = asyncio.run(several())
    assert [response.status_code for response in responses] == [200] * 4
    assert len({response.json()["request_id"] for response in responses}) == 4
    assert all(response.headers["x-request-id"] == "same" for response in responses)


def test_a_name_in_use_is_refused_and_its_owner_undisturbed(server: RunningServer) -> None:
    owner = send(server.url, long_query(end_id_of(server.engine), request_id="taken", stream=True))
    assert eventually(lambda: "taken" in server.state.running)
    with server.client() as client:
        response = client.post("/v1/query", json={"question": "Who are you?", "request_id": "taken"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "request_id")
    assert "taken" in server.state.running
    owner.close()
    assert eventually(lambda: server.engine.num_requests == 0)


def test_the_api_describes_itself(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert {f"/v1/{skill}" for skill in ("query", "caption", "point", "detect", "segment")} <= paths.keys()
    body = paths["/v1/query"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"question", "image_url", "settings", "stream"} <= body["properties"].keys()


def test_programs_can_ask_for_facts(client: httpx.Client, server: RunningServer) -> None:
    told, model = client.get("/server_info").json(), client.get("/model_info").json()
    jsonschema.validate(told, SERVER_INFO)
    jsonschema.validate(model, MODEL_INFO)
    assert (told["status"], told["needs_key"], told["served_model_name"]) == ("ready", False, "kestrel-tiny")
    assert told["limits"]["max_body_bytes"] == server.state.config.max_body_bytes
    assert told["limits"]["max_model_len"] == model["max_model_len"] == server.engine.max_model_length
    assert model["skills"] == ["query", "caption", "point", "detect", "segment", "chat", "complete", "embed"]
    assert (model["model"], model["reads_pictures"], model["tool_parser"]) == ("kestrel-tiny", True, None)


def test_metrics_have_what_the_endpoint_picker_of_the_gateway_reads(client: httpx.Client) -> None:
    manifest = Path(__file__).parents[2] / "deploy" / "kubernetes" / "gateway" / "endpoint-picker.yaml"
    config = yaml.safe_load(next(yaml.safe_load_all(manifest.read_text(encoding="utf-8")))["data"]["config.yaml"])
    (extractor,) = [plugin for plugin in config["plugins"] if plugin["type"] == "core-metrics-extractor"]
    (engine,) = extractor["parameters"]["engineConfigs"]
    page = client.get("/metrics").text
    gauges = set(re.findall(r"^# TYPE (\S+) gauge$", page, re.MULTILINE))
    assert {name for spec, name in engine.items() if spec.endswith("Spec")} <= gauges
    assert re.search(r"^vllm:cache_config_info{(?=.*block_size=)(?=.*num_gpu_blocks=)", page, re.MULTILINE)


async def asked(app: object, path: str, method: str = "GET") -> httpx.Response:
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.request(method, path, headers=JSON)


async def test_a_starting_server_says_so_and_refuses() -> None:
    gate = asyncio.Event()

    async def slow_factory() -> InferenceEngine:
        await gate.wait()
        raise AssertionError("not reached")

    app = create_app(slow_factory)
    async with app.router.lifespan_context(app):
        for path in ("/healthz", "/health", "/ready", "/readyz"):
            response = await asked(app, path)
            assert (response.status_code, response.json()["status"]) == (503, "starting")
            assert response.headers["retry-after"] == "1"
        assert (await asked(app, "/version")).status_code == 200
        assert (await asked(app, "/server_info")).json()["status"] == "starting"
        assert (await asked(app, "/model_info")).status_code == 503
        refused = await asked(app, "/v1/query", "POST")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_serving")


async def test_a_model_that_cannot_be_loaded_leaves_a_server_that_says_it_failed() -> None:
    async def factory() -> InferenceEngine:
        raise CheckpointError("the file /models/secret is damaged")

    app = create_app(factory)
    async with app.router.lifespan_context(app):
        await app_state(app).settled.wait()
        response = await asked(app, "/healthz")
        assert (response.status_code, response.json()["status"]) == (503, "failed")
        assert "secret" not in response.text
        assert isinstance(app_state(app).failure, CheckpointError)


async def test_an_engine_that_was_handed_over_is_used_and_left_running() -> None:
    async with await InferenceEngine.create(runtime_config(model_path=coarse_folder(EMBEDDED))) as engine:
        app = create_app(engine, ServerConfig())
        async with app.router.lifespan_context(app):
            await app_state(app).settled.wait()
            assert (await asked(app, "/ready")).status_code == 200
        assert engine.is_running


@pytest.fixture
def doomed() -> Iterator[RunningServer]:
    yield from start_server(ServerConfig(port=0), RuntimeConfig(device="cpu", kv_cache_pages=300))


def test_a_dead_worker_turns_health_to_503(doomed: RunningServer) -> None:
    def die() -> None:
        raise SystemError("device lost at 0x7f0012345678")

    doomed.engine._scheduler.step = die  # type: ignore[method-assign]
    with doomed.client() as client:
        response = client.post("/v1/query", json={"question": "Who are you?"})
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_stopped"
        assert "0x" not in response.text
        for path in ("/healthz", "/ready"):
            assert (client.get(path).status_code, client.get(path).json()["status"]) == (503, "failed")
        again = client.post("/v1/query", json={"question": "Who are you?"})
        assert again.status_code == 503


@pytest.mark.parametrize(
    "path",
    [
        "/healthz",
        "/health",
        "/ready",
        "/readyz",
        "/version",
        "/server_info",
        "/model_info",
        "/metrics",
        "/v1/models",
        "/v1/models/kestrel-tiny",
        "/tokenizer_info",
        "/openapi.json",
        "/docs",
        "/",
    ],
)
def test_every_route_that_can_be_read_answers_head_as_get_without_the_body(client: httpx.Client, path: str) -> None:
    whole, head = client.get(path), client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert head.headers["x-request-id"]
    assert client.head("/v1/models/another").status_code == 404
