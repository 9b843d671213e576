"""The layers that a request passes before its route, outermost first; `http.py` puts them around the application.

Its head, the web page it comes from, its key, the number of its client's requests, its body: each may refuse it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Sequence
from functools import lru_cache

from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kestrel.api_keys import offered_keys
from kestrel.errors import shown
from kestrel.server.calls import Interruption, release_accepted
from kestrel.server.config import ServerConfig
from kestrel.server.connections import is_crowded
from kestrel.server.errors import (
    AmbiguousLength,
    BodyTooLarge,
    ForeignHost,
    ForeignOrigin,
    HeadTooLarge,
    NotJson,
    SlowClient,
    TooManyConnections,
)
from kestrel.server.json_body import content_type, how_to_send, is_form
from kestrel.server.records import HEALTH_PATHS, METRICS_PATH, header_of, is_messages_path, route_path
from kestrel.server.state import HeldBytes, ServerState
from kestrel.settings import MAX_NAME_LENGTH

OPEN_PATHS = HEALTH_PATHS | {"/", "/version", "/docs"}
"""Routes that need no key, beside everything in OPEN_FOLDER."""
OPEN_FOLDER = "/playground/"
MODELS_PATH = "/v1/models"
"""Clients of the Messages API ask for it too, with their own header for the key."""
ANY = "*"
HARMLESS_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""They change nothing, and no page of another site can read what they answer."""
LINGER_S = 5.0
"""How long the rest of a refused body is read and dropped, so that the client sees the refusal and no reset."""
LINGER_BYTES = 256 * 2**20


def is_open(path: str, config: ServerConfig) -> bool:
    """Whether the route needs no key and does not count as a client's request."""
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER) or (config.metrics_open and path == METRICS_PATH)


def _is_health(scope: Scope) -> bool:
    return route_path(scope) in HEALTH_PATHS


# ---------------------------------------------------------------------- the head


class HeadLimit:
    """Refuses a head that is too large, or that frames its body in two ways, which a proxy may read otherwise, and
    all but health routes on a connection beyond the limit.

    The connection's own bound stops a head that is still arriving; one that came in a single piece is seen here.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._limit = config.max_header_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if is_crowded(scope) and not _is_health(scope):
                raise TooManyConnections("no connection is free (max_connections, ulimit -n); retry later")
            if _head_bytes(scope) > self._limit:
                raise HeadTooLarge(f"request line and headers exceed {self._limit} bytes (max_header_bytes); send less")
            if header_of(scope, b"transfer-encoding") is not None and header_of(scope, b"content-length") is not None:
                raise AmbiguousLength("Content-Length and Transfer-Encoding are both given; send one of them")
        await self._app(scope, receive, send)


def _head_bytes(scope: Scope) -> int:
    line = len(scope["method"]) + len(scope.get("raw_path") or b"") + len(scope["query_string"])
    return line + sum(len(name) + len(value) + len(": \r\n") for name, value in scope["headers"])


# ---------------------------------------------------------------------- web pages


class WebPages:
    """What a web page may make a browser send here: nothing from another site, unless the operator says so.

    A server without a key is open to whoever can connect, and a browser on this machine can. So its Host must be a name
    of this server (a page can have its own name resolve to loopback), no foreign page may post, and a body must be
    declared as JSON, which browsers ask leave for, or as a form: with that they tell the origin, and only routes of
    skills read it. With a key none of it is needed: a page does not have the key.
    Health routes answer under any name: whoever probes them calls an address.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._names = frozenset(name.lower() for name in config.allowed_hosts)
        self._origins = frozenset(config.cors_origins)
        self._own_name = config.host.lower()
        self._is_open = not config.has_keys
        is_private = self._is_open and config.is_loopback and not config.insecure
        self._checks_host = ANY not in self._names and (bool(self._names) or is_private)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_health(scope):
            host = header_of(scope, b"host")
            if self._checks_host and host is not None and not self._is_ours(_name_in(host)):
                raise ForeignHost(
                    f"the Host {shown(host)} is not known here; call localhost, or start with --allowed-host NAME"
                )
            if self._is_open and scope["method"] not in HARMLESS_METHODS:
                self._refuse_foreign_page(scope, host)
                if scope["method"] == "POST" and not is_form(scope):
                    _require_json(scope)
        await self._app(scope, receive, send)

    def _is_ours(self, name: str) -> bool:
        return name in ("localhost", self._own_name) or name in self._names or _is_loopback(name)

    def _refuse_foreign_page(self, scope: Scope, host: str | None) -> None:
        """Browsers say where a page came from; `sec-fetch-site` holds behind a proxy that changes the Host, too."""
        origin = header_of(scope, b"origin")
        if origin is None or header_of(scope, b"sec-fetch-site") == "same-origin":
            return
        if ANY in self._origins or origin in self._origins:
            return
        authority = origin.lower().partition("://")[2]
        if not authority or (authority != _authority_in(scope, host) and _name_in(authority) not in self._names):
            raise ForeignOrigin(
                f"pages of {shown(origin)} may not call this server; allow them with --cors-origin ORIGIN"
            )


def _authority_in(scope: Scope, host: str | None) -> str:
    """As an origin writes it: the scheme's usual port is left out."""
    given = (host or "").lower()
    return given.removesuffix(":443" if scope["scheme"] == "https" else ":80")


def _name_in(authority: str) -> str:
    """Without the port, the brackets of an IPv6 address and the final dot."""
    given = authority.strip().lower()
    if given.startswith("["):
        return given[1:].partition("]")[0]
    return given.partition(":")[0].removesuffix(".")


@lru_cache(maxsize=64)
def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _require_json(scope: Scope) -> None:
    given = header_of(scope, b"content-type")
    kind = content_type(scope)
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        told = "no Content-Type" if given is None else f"the Content-Type {shown(given)}"
        raise NotJson(f"the body has {told}; {how_to_send(scope)}")


# ---------------------------------------------------------------------- keys


class Authentication:
    """Puts `client` (who calls, for limits and logs) and `tenant` (whose cached KV it may share) on the request."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            is_asked = self._state.keys and not is_open(route_path(scope), self._state.config)
            offered = _keys_in(scope) if is_asked else None
            client, tenant = self._state.identify(offered, _address(scope))
            scope["state"]["client"], scope["state"]["tenant"] = client, tenant
        await self._app(scope, receive, send)


def _keys_in(scope: Scope) -> list[bytes]:
    headers = Headers(scope=scope)
    others = (headers.get(name, "") for name in key_headers(route_path(scope)))
    return offered_keys(headers.get("authorization", ""), *others)


def key_headers(path: str) -> tuple[str, ...]:
    """Headers beside Authorization that a key may come in."""
    takes_theirs = is_messages_path(path) or path == MODELS_PATH or path.startswith(f"{MODELS_PATH}/")
    return ("x-moondream-auth", "x-api-key") if takes_theirs else ("x-moondream-auth",)


def _address(scope: Scope) -> str:
    """What a proxy says may be empty, or longer than the engine takes for a name."""
    client = scope.get("client")
    return "unknown" if client is None else str(client[0])[:MAX_NAME_LENGTH] or "unknown"


# ---------------------------------------------------------------------- how much at a time


class ClientLimit:
    """Refuses a client with too many unanswered requests, before its body is read."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._clients = state.clients
        self._config = state.config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(route_path(scope), self._config):
            await self._app(scope, receive, send)
            return
        with self._clients.counted(scope["state"]["client"]):
            await self._app(scope, receive, send)


class BodyLimit:
    """Counts a body while it arrives: too large, too slow or too much in all ends it before it is buffered."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _IncomingBody(self._state, scope, receive)
        try:
            await self._app(scope, body.receive, send)
        finally:
            body.release()
            release_accepted(scope)


class _IncomingBody:
    def __init__(self, state: ServerState, scope: Scope, receive: Receive) -> None:
        self._state = state
        self._receive = receive
        self._declared = _declared_length(scope)
        self._awaits_go_ahead = (header_of(scope, b"expect") or "").lower() == "100-continue"
        self._deadline_s = time.monotonic() + state.config.receive_timeout_s
        self._held = HeldBytes(state)
        self._complete = False

    async def receive(self) -> Message:
        if self._complete:
            return await self._receive()
        limit = self._state.config.max_body_bytes
        if self._declared > limit:
            await self._refuse(limit)
        message = await self._next_in_time()
        if message["type"] == "http.request":
            self._held.add(len(message.get("body", b"")))
            if self._held.num_bytes > limit:
                await self._refuse(limit)
            self._complete = not message.get("more_body", False)
        return message

    def release(self) -> None:
        self._held.release()

    async def _next_in_time(self) -> Message:
        if self._state.draining:
            self._state.require_serving()
        seconds = self._state.config.receive_timeout_s
        late = SlowClient(f"the body did not arrive within {seconds:g} s (receive_timeout_s); send it faster")
        with Interruption(late) as waiting:
            self._state.arriving.add(waiting)
            left_s = max(self._deadline_s - time.monotonic(), 0.001)
            timer = asyncio.get_running_loop().call_later(left_s, waiting.interrupt)
            try:
                return await self._receive()
            finally:
                timer.cancel()
                self._state.arriving.discard(waiting)

    async def _refuse(self, limit: int) -> None:
        """Raises. Most clients send everything before they listen, so the rest is let in and dropped for a while."""
        self.release()
        if not self._awaits_go_ahead:
            await self._drop_rest()
        raise BodyTooLarge(f"the body exceeds {limit} bytes (max_body_bytes); send less, such as a smaller picture")

    async def _drop_rest(self) -> None:
        deadline_s, dropped = time.monotonic() + LINGER_S, 0
        while dropped < LINGER_BYTES:
            try:
                message = await asyncio.wait_for(self._receive(), max(deadline_s - time.monotonic(), 0.001))
            except asyncio.TimeoutError:
                return
            if message["type"] != "http.request" or not message.get("more_body", False):
                return
            dropped += len(message["body"])


def _declared_length(scope: Scope) -> int:
    value = header_of(scope, b"content-length") or ""
    return int(value) if value.isascii() and value.isdigit() and len(value) < 20 else 0


# ---------------------------------------------------------------------- the route


class DirectRoute(APIRoute):
    """The route of an endpoint `async (Request) -> Response` that leaves its refusals to `ErrorBoundary`."""


class DirectRoutes:
    """The innermost layer: calls the endpoints of `DirectRoute`s, leaves all else to the application.

    The application knows these routes too: it describes them and answers what is not a plain call, such as another
    method. But its dependencies, exit stacks and search through all routers do nothing for such an endpoint, and cost
    a quarter of a millisecond.
    """

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
