"""Who may call: API keys, compared in constant time. Health routes and the playground's page are open to everybody."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from kestrel.api_keys import ApiKeys, offered_keys
from kestrel.engine.intake import MAX_NAME_LENGTH
from kestrel.errors import NotAllowed, shown
from kestrel.server.config import ServerConfig
from kestrel.server.records import route_path

HEALTH_PATHS = frozenset({"/healthz", "/health", "/readyz", "/ready"})
OPEN_PATHS = HEALTH_PATHS | {"/", "/version"}
"""Routes that need no key, beside everything in OPEN_FOLDER."""
OPEN_FOLDER = "/playground/"
KEY_CLIENT = "key "
"""What stands before a key's name in the name of a client."""


def is_open(scope: Scope) -> bool:
    """Whether the route needs no key and does not count as a client's request."""
    path = route_path(scope)
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


def is_health(scope: Scope) -> bool:
    return route_path(scope) in HEALTH_PATHS


class Authentication:
    """Puts `client` (who calls, for limits and logs) and `tenant` (whose cached KV it may share) on the request."""

    def __init__(self, app: ASGIApp, config: ServerConfig, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys
        self._isolates = config.isolate_prefix_cache

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            name = None if self._is_open(scope) else self._keys.require(keys_in(Headers(scope=scope)))
            scope["state"]["client"] = f"{KEY_CLIENT}{name}" if name else _address(scope)
            scope["state"]["tenant"] = name if self._isolates else None
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return not self._keys or is_open(scope)


def require_priority(keys: ApiKeys, client: str, priority: object) -> None:
    """Only an urgent key goes before others. Raises NotAllowed; what is no number is refused by the engine."""
    if not isinstance(priority, int) or priority >= 0:
        return
    if not client.startswith(KEY_CLIENT) or not keys.is_urgent(client.removeprefix(KEY_CLIENT)):
        remedy = "leave it out, or ask the operator for a key set with --urgent-api-key"
        raise NotAllowed("priority", f"{shown(priority)} is below 0, which needs an urgent API key; {remedy}")


def keys_in(headers: Headers) -> list[bytes]:
    return offered_keys(headers.get("authorization", ""), headers.get("x-moondream-auth", ""))


def client_of(connection: HTTPConnection) -> str:
    return connection.scope["state"]["client"]


def tenant_of(connection: HTTPConnection) -> str | None:
    return connection.scope["state"]["tenant"]


def _address(scope: Scope) -> str:
    """What a proxy says may be empty, or longer than the engine takes for a name."""
    client = scope.get("client")
    return "unknown" if client is None else str(client[0])[:MAX_NAME_LENGTH] or "unknown"
