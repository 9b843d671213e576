"""The routes of engine requests without the framework around them.

The application knows them too: it describes them and answers what is not a plain call, such as another method. But
its layers between the server's own and an endpoint that takes the request and gives the response as they are
(dependencies, exit stacks, a search through all routers) do nothing for such an endpoint, and cost it a quarter of a
millisecond.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from kestrel.server.records import route_path


class DirectRoute(APIRoute):
    """Of an endpoint `async (Request) -> Response` that leaves its refusals to `ErrorBoundary`."""


class DirectRoutes:
    """The innermost layer: calls the endpoints of `DirectRoute`s, leaves all else to the application."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        direct = [route for route in routes if isinstance(route, DirectRoute) and not route.param_convertors]
        self._routes = {(method, route.path): route for route in direct for method in route.methods or ()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get((scope["method"], route_path(scope))) if scope["type"] == "http" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        response = await route.endpoint(Request(scope, receive, send))
        await response(scope, receive, send)
