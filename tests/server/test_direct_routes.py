"""Plain calls of an endpoint skip the framework; everything else about the route is the framework's."""

from __future__ import annotations

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Receive, Scope, Send

from kestrel.server.middleware import DirectRoute, DirectRoutes


class CountedApp:
    """Below the direct routes; it sees what reaches the framework."""

    num_requests = 0

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        CountedApp.num_requests += 1
        await self._app(scope, receive, send)


async def echo(request: Request) -> Response:
    return PlainTextResponse(f"{request.scope['route'].path} {(await request.body()).decode()}")


@pytest.fixture
def direct() -> TestClient:
    CountedApp.num_requests = 0
    router = APIRouter(route_class=DirectRoute)
    router.add_api_route("/echo", echo, methods=["POST"], response_model=None)
    router.add_api_route("/echo/{name}", echo, methods=["POST"], response_model=None)
    layers = [Middleware(DirectRoutes, routes=router.routes), Middleware(CountedApp)]
    app = FastAPI(middleware=layers)
    app.include_router(router)
    return TestClient(app, root_path="/under")


@pytest.mark.parametrize("path", ["/echo", "/under/echo"])
def test_a_plain_call_does_not_reach_the_framework(direct: TestClient, path: str) -> None:
    assert direct.post(path, content=b"hello").text == "/echo hello"
    assert CountedApp.num_requests == 0


def test_a_path_with_parameters_does(direct: TestClient) -> None:
    assert direct.post("/echo/name", content=b"hello").text == "/echo/{name} hello"
    assert CountedApp.num_requests == 1


def test_so_do_other_methods_and_unknown_paths(direct: TestClient) -> None:
    assert direct.get("/echo").status_code == 405
    assert direct.post("/echoes").status_code == 404
    assert CountedApp.num_requests == 2


def test_the_skills_are_called_directly_and_described(client: httpx.Client) -> None:
    described = client.get("/openapi.json").json()["paths"]
    assert {"/v1/query", "/v1/chat/completions"} <= set(described)
    assert client.get("/v1/query").status_code == 405
