"""Who may call: API keys, compared in constant time. Health routes and the playground's page are open to everybody."""

from __future__ import annotations

import hashlib
import hmac
import secrets

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from kestrel.server.config import ServerConfig
from kestrel.server.errors import Unauthorised
from kestrel.server.paths import route_path

OPEN_PATHS = frozenset({"/", "/healthz", "/health", "/ready", "/version"})
"""Routes that need no key, beside everything in OPEN_FOLDER."""
OPEN_FOLDER = "/playground/"


def is_open(scope: Scope) -> bool:
    """Whether the route needs no key and does not count as a client's request."""
    path = route_path(scope)
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


class Authentication:
    """Puts `client` (who calls, for limits and logs) and `tenant` (whose cached KV it may share) on the request."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._keys = [_digest(key.encode()) for key in config.api_keys]
        self._isolates = config.isolate_prefix_cache
        self._salt = secrets.token_bytes(16)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            key = None if self._is_open(scope) else self._require_key(Headers(scope=scope))
            name = None if key is None else hmac.new(self._salt, key, hashlib.sha256).hexdigest()[:16]
            scope["state"]["client"] = f"key {name}" if name else _address(scope)
            scope["state"]["tenant"] = name if self._isolates else None
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return not self._keys or is_open(scope)

    def _require_key(self, headers: Headers) -> bytes:
        """The digest of the key. Digests are compared, so that not even a key's length shows in the time it takes."""
        offered = [_digest(key) for key in offered_keys(headers)]
        if not offered:
            raise Unauthorised("an API key is required; send `Authorization: Bearer KEY` or `X-Moondream-Auth: KEY`")
        known = [key for key in self._keys for candidate in offered if hmac.compare_digest(key, candidate)]
        if not known:
            raise Unauthorised("the API key is not known; check it, or ask the operator for one")
        return known[0]


def offered_keys(headers: Headers) -> list[bytes]:
    """Every key of a request; an empty header counts as absent."""
    scheme, _, bearer = headers.get("authorization", "").strip().partition(" ")
    offered = [bearer if scheme.lower() == "bearer" else "", headers.get("x-moondream-auth", "")]
    return [key.strip().encode("latin-1") for key in offered if key.strip()]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def client_of(connection: HTTPConnection) -> str:
    return connection.scope["state"]["client"]


def tenant_of(connection: HTTPConnection) -> str | None:
    return connection.scope["state"]["tenant"]


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return "unknown" if client is None else str(client[0])
