"""A server on loopback without a key, and a browser on the same machine: pages of other sites get nothing from it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from kestrel.server.config import ServerConfig
from kestrel.server.http import create_app
from tests.engine.fake_engine import fake_engine
from tests.server.conftest import KEYS, RunningServer, runtime_config, start_server

QUESTION = json.dumps({"question": "Who are you?", "max_tokens": 1})
EVIL = "http://evil.example"


def post(server: RunningServer, **headers: str) -> httpx.Response:
    sent = {name.replace("_", "-"): value for name, value in {"content_type": "application/json", **headers}.items()}
    return httpx.post(f"{server.url}/v1/query", content=QUESTION, headers=sent, timeout=60)


def code_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


@pytest.fixture(scope="module")
def named() -> Iterator[RunningServer]:
    """Behind a proxy, and called from the pages of one other site."""
    config = ServerConfig(port=0, allowed_hosts=("vision.example",), cors_origins=("https://app.example",))
    yield from start_server(config, runtime_config())


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "10.0.0.5", "a", "[2001:db8::1]"]
)
def test_a_name_that_resolves_to_loopback_is_no_way_in(server: RunningServer, host: str) -> None:
    """Such a page is of its own origin as far as the browser knows, and could read the answers."""
    refused = post(server, host=host, origin=f"http://{host}")
    assert code_of(refused) == (403, "host_not_allowed")
    assert "--allowed-host" in refused.json()["error"]["message"]
    for path in ("/v1/models", "/metrics", "/openapi.json", "/", "/version"):
        assert code_of(httpx.get(server.url + path, headers={"host": host})) == (403, "host_not_allowed")
    assert httpx.get(f"{server.url}/healthz", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "localhost.:80", "127.0.0.1", "127.9.9.9:8080", "[::1]:8080"]
)
def test_every_name_of_loopback_is_known(server: RunningServer, host: str) -> None:
    assert post(server, host=host).status_code == 200


@pytest.mark.parametrize(("insecure", "status"), [(False, 403), (True, 200)])
async def test_any_name_is_taken_where_the_operator_wants_no_key(insecure: bool, status: int) -> None:
    """Ray listens for an ingress, which knows its own host as loopback."""
    app = create_app(fake_engine(), ServerConfig(insecure=insecure))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://10.0.0.5:8000") as client:
        assert (await client.get("/version")).status_code == status


@pytest.mark.parametrize(
    "origin", [EVIL, "https://evil.example", "null", "http://localhost:1", "http://127.0.0.1", "file://"]
)
def test_a_page_of_another_site_may_not_post(server: RunningServer, origin: str) -> None:
    refused = post(server, origin=origin)
    assert code_of(refused) == (403, "origin_not_allowed")
    assert "--cors-origin" in refused.json()["error"]["message"]
    assert code_of(post(server, origin=origin, sec_fetch_site="cross-site")) == (403, "origin_not_allowed")


def test_the_servers_own_page_may_post(server: RunningServer) -> None:
    assert post(server, origin=server.url).status_code == 200
    assert post(server, origin="https://vision.example", sec_fetch_site="same-origin").status_code == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_a_body_that_browsers_send_without_asking_is_no_json(server: RunningServer, kind: str) -> None:
    for path in ("/v1/query", "/v1/chat/completions", "/tokenize"):
        refused = httpx.post(server.url + path, content=QUESTION, headers={"content-type": kind} if kind else {})
        assert code_of(refused) == (415, "unsupported_content_type")
        assert "Content-Type: application/json" in refused.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"])
def test_every_way_to_say_json_is_taken(server: RunningServer, kind: str) -> None:
    assert post(server, content_type=kind).status_code == 200


def test_names_and_sites_that_the_operator_allows_are_let_in(named: RunningServer) -> None:
    assert post(named, host="vision.example", origin="https://vision.example").status_code == 200
    assert post(named, host="localhost", origin="https://vision.example").status_code == 200
    allowed = post(named, origin="https://app.example")
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://app.example")
    assert code_of(post(named, host="other.example")) == (403, "host_not_allowed")
    assert code_of(post(named, host="vision.example", origin=EVIL)) == (403, "origin_not_allowed")


def test_with_a_key_no_name_and_no_site_matters(locked: RunningServer) -> None:
    """Probes and proxies call it by any name; a page does not have the key."""
    answered = post(locked, host="pod-7", origin=EVIL, content_type="text/plain", authorization=f"Bearer {KEYS[0]}")
    assert answered.status_code == 200
    assert post(locked, host="pod-7").status_code == 401
