"""Keys: who gets in, and what stays open to everybody."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from kestrel.engine import InferenceEngine
from kestrel.server.config import ServerConfig
from kestrel.server.http import create_app
from tests.server.conftest import KEYS, SCENE_URL, RunningServer

QUESTION = {"question": "Who are you?", "max_tokens": 1}


@pytest.fixture
def visitor(locked: RunningServer) -> Iterator[httpx.Client]:
    with locked.client() as client:
        yield client


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("header", ["Authorization", "X-Moondream-Auth"])
def test_every_key_opens_in_both_headers(visitor: httpx.Client, header: str, key: str) -> None:
    value = f"Bearer {key}" if header == "Authorization" else key
    assert visitor.post("/v1/query", json=QUESTION, headers={header: value}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"X-Moondream-Auth": ""},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer first-key2"},
        {"Authorization": "Bearer first"},
        {"Authorization": "Basic first-key"},
        {"Authorization": "first-key"},
        {"X-Moondream-Auth": "wrong"},
        {"X-Moondream-Auth": "\xe4\xf6"},
    ],
)
def test_anything_else_is_401(visitor: httpx.Client, headers: dict[str, str]) -> None:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    response = visitor.post("/v1/query", json=QUESTION, headers=raw)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.json()["error"]["type"] == "authentication_error"
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"]


def test_an_empty_header_counts_as_absent_beside_a_good_one(visitor: httpx.Client) -> None:
    headers = {"Authorization": "Bearer", "X-Moondream-Auth": "first-key"}
    assert visitor.post("/v1/query", json=QUESTION, headers=headers).status_code == 200
    headers = {"Authorization": "Bearer first-key", "X-Moondream-Auth": ""}
    assert visitor.post("/v1/query", json=QUESTION, headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/health", "/ready", "/readyz", "/version"])
def test_health_needs_no_key(visitor: httpx.Client, path: str) -> None:
    assert visitor.get(path).status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1/query", "/v1/nothing", "/openapi.json", "/%2fhealthz", "/healthz/", "/playground"]
)
def test_nothing_else_is_open(visitor: httpx.Client, path: str) -> None:
    assert visitor.request("POST", path, json=QUESTION).status_code == 401


def test_facts_need_a_key_and_hold_none(visitor: httpx.Client) -> None:
    for path in ("/server_info", "/model_info", "/metrics"):
        assert visitor.get(path).status_code == 401
        told = visitor.get(path, headers={"authorization": f"Bearer {KEYS[0]}"})
        assert told.status_code == 200
        assert not any(key in told.text for key in KEYS)


async def test_metrics_can_be_open_where_all_else_needs_a_key() -> None:
    async def no_engine() -> InferenceEngine:
        raise AssertionError("not reached")

    app = create_app(no_engine, ServerConfig(api_keys=("key",), metrics_open=True))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.get("/metrics")).status_code == 503, "the engine is loading"
        assert (await client.get("/server_info")).status_code == 401


def test_the_description_tells_where_a_key_goes(visitor: httpx.Client, client: httpx.Client) -> None:
    schema = visitor.get("/openapi.json", headers={"x-moondream-auth": KEYS[0]}).json()
    both = [{"bearer": []}, {"x-moondream-auth": []}]
    assert {name for way in both for name in way} < schema["components"]["securitySchemes"].keys()
    paths = schema["paths"]
    assert paths["/v1/query"]["post"]["security"] == both
    assert paths["/v1/messages"]["post"]["security"] == [*both, {"x-api-key": []}]
    assert paths["/healthz"]["get"]["security"] == []
    assert "security" not in client.get("/openapi.json").json()["paths"]["/v1/query"]["post"]


def test_a_stranger_is_refused_before_the_body_is_read(visitor: httpx.Client) -> None:
    response = visitor.post("/v1/query", content=b"x" * 2**20)
    assert response.status_code == 401


def test_keys_share_no_cached_pictures_when_isolated(visitor: httpx.Client) -> None:
    body = {"question": "Is there a dog?", "image_url": SCENE_URL, "max_tokens": 1}

    def cached(key: str) -> int:
        response = visitor.post("/v1/query", json=body, headers={"X-Moondream-Auth": key})
        return response.json()["metrics"]["cached_tokens"]

    cached("first-key")
    assert cached("first-key") > 700
    assert cached("second-key") == 0


def test_observers_see_a_digest_and_never_the_key(locked: RunningServer, visitor: httpx.Client) -> None:
    seen: list[str] = []

    class Spy:
        def started(self, request: object) -> None:
            seen.append(repr(request))

        def finished(self, request: object, outcome: object) -> None:
            seen.append(repr(outcome))

    spy = Spy()
    locked.state.observers.append(spy)
    visitor.post("/v1/query", json=QUESTION, headers={"X-Moondream-Auth": "first-key"})
    locked.state.observers.remove(spy)
    assert len(seen) == 2
    assert "first-key" not in "".join(seen)
    assert "key " in seen[0]


def test_a_page_of_an_allowed_origin_may_ask_before_it_has_a_key(visitor: httpx.Client) -> None:
    asks = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    response = visitor.options("/v1/query", headers={**asks, "Access-Control-Request-Headers": "authorization"})
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://app.example"
    assert visitor.options("/v1/query", headers={**asks, "Origin": "https://evil.example"}).status_code == 400
    refused = visitor.post("/v1/query", json=QUESTION, headers={"Origin": "https://app.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://app.example"
