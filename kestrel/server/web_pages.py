"""What a web page may make a browser send here: nothing from another site, unless the operator says so.

A server without a key is open to whoever can connect, and a browser on this machine can. So its Host must be a name of
this server (a page can have its own name resolve to loopback), no foreign page may post, and a body must be declared as
JSON, which browsers ask leave for. With a key none of it is needed: a page does not have the key.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache

from starlette.types import ASGIApp, Receive, Scope, Send

from kestrel.errors import shown
from kestrel.server.auth import is_health
from kestrel.server.config import ServerConfig
from kestrel.server.errors import ForeignHost, ForeignOrigin, NotJson
from kestrel.server.records import header_of

ANY = "*"
HARMLESS_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""They change nothing, and no page of another site can read what they answer."""


class WebPages:
    """Health routes answer under any name: whoever probes them calls an address."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._names = frozenset(name.lower() for name in config.allowed_hosts)
        self._origins = frozenset(config.cors_origins)
        self._own_name = config.host.lower()
        self._is_open = not config.has_keys
        is_private = self._is_open and config.is_loopback
        self._checks_host = ANY not in self._names and (bool(self._names) or is_private)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_health(scope):
            host = header_of(scope, b"host")
            if self._checks_host and host is not None and not self._is_ours(_name_in(host)):
                raise ForeignHost(
                    f"the Host {shown(host)} is not known here; call localhost, or start with --allowed-host NAME"
                )
            if self._is_open and scope["method"] not in HARMLESS_METHODS:
                self._refuse_foreign_page(scope, host)
                if scope["method"] == "POST":
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
    kind = (given or "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        told = "no Content-Type" if given is None else f"the Content-Type {shown(given)}"
        raise NotJson(f"the body has {told}; send JSON with Content-Type: application/json")
