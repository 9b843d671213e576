"""Pictures as requests carry them: a base64 data URL, raw base64, or a URL that the operator allows.

URLs are off unless the operator names hosts, and then only public addresses of those hosts are asked. The name is
resolved here, every address it has is checked, and the connection goes to a checked address, with the name in the Host
header and in TLS. So a name that resolves differently a moment later (DNS rebinding) gains nothing. Each redirect is a
new URL and passes the same checks. No proxy, cookie or credential is used.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeAlias

import httpx

from kestrel.errors import ConfigError, RequestError, shown
from kestrel.images.encoded import base64_start, decode_base64, require_decodable
from kestrel.threads import Threads

LARGE_TEXT = 2**20
"""Base64 from this length on is decoded off the event loop."""
FIELD = "image_url"
PORTS = {"http": 80, "https": 443}
REDIRECTS = frozenset({301, 302, 303, 307, 308})
REQUEST_HEADERS = {"accept": "image/*", "accept-encoding": "identity", "user-agent": "kestrel"}

Resolver: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
"""From host name and port to its addresses."""
_GLOBAL_IPV6 = ipaddress.ip_network("2000::/3")
_WEB_URL = re.compile(r"https?://", re.IGNORECASE)


_OTHER_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_FILE_NAME = re.compile(r".{1,1000}\.(?:jpe?g|png|webp|gif|bmp|tiff?|heic|avif)", re.IGNORECASE)
"""Base64 has no dots."""


class NotFetched(RequestError):
    """A picture by its address, where none is fetched."""


class ImageFetcher(Protocol):
    """Fetches pictures from hosts that the operator allows."""

    async def fetch(self, url: str, max_bytes: int, hold: Callable[[int], None]) -> bytes:
        """`hold` is told of bytes as they arrive, and may refuse them."""
        ...


class NoRemoteImages:
    """The fetcher of a server that fetches nothing."""

    async def fetch(self, url: str, max_bytes: int, hold: Callable[[int], None]) -> bytes:
        raise NotFetched("image_url", "web addresses are not fetched here; send the picture as a base64 data URL")


async def image_bytes(
    value: object,
    max_bytes: int,
    fetch: Callable[[str], Awaitable[bytes]],
    threads: Threads,
    field: str = "image_url",
) -> bytes:
    """The encoded picture. The media type of a data URL is not used: the bytes say what they are."""
    if not isinstance(value, str):
        raise RequestError(field, f"must be a base64 data URL or raw base64 as text (got {shown(value)})")
    if _WEB_URL.match(value):
        return await fetch(value)
    if other := _OTHER_URL.match(value):
        problem = f"is a {other.group()} address, which is not read here"
        raise RequestError(field, f"{problem}; send the picture as a base64 data URL")
    if _FILE_NAME.fullmatch(value):
        raise RequestError(field, "is the name of a file; send what is in the file, as a base64 data URL")
    if len(value) < LARGE_TEXT:
        return _decoded(value, max_bytes, field)
    return await threads.run(_decoded, value, max_bytes, field)


def _decoded(value: str, max_bytes: int, field: str) -> bytes:
    start = base64_start(value, field)
    require_decodable(value, max_bytes, field, start)
    return decode_base64(value, field, start)


# ---------------------------------------------------------------------- pictures by URL


def is_public(address: str) -> bool:
    """False for private, loopback, link-local, shared, multicast, reserved and unspecified addresses.

    IPv6 forms that carry an IPv4 address (mapped, compatible, 6to4, Teredo, NAT64) are refused whatever they carry;
    of the rest only 2000::/3 has ever been given out for the public.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if parsed.is_multicast or parsed.is_reserved or parsed.is_unspecified or not parsed.is_global:
        return False
    if isinstance(parsed, ipaddress.IPv6Address):
        return parsed in _GLOBAL_IPV6 and not _carries_ipv4(parsed)
    return True


def _carries_ipv4(address: ipaddress.IPv6Address) -> bool:
    carried = (address.ipv4_mapped, address.sixtofour, address.teredo)
    return any(c is not None for c in carried)


class _SystemResolver:
    """The system's own look-up, on threads of its own: a name server that is silent holds up nothing else."""

    def __init__(self, num_threads: int) -> None:
        self._threads = Threads("names", num_threads)

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        found = await self._threads.run(socket.getaddrinfo, host, port, 0, socket.SOCK_STREAM)
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class RemoteImages:
    """`fetch` is the only door. Hosts are exact names or `*.example.org` (its subdomains, not itself), each with an
    optional `:port`; without one the ports are 80 and 443. None allows every host at these."""

    def __init__(
        self,
        allowed_hosts: Sequence[str] | None,
        *,
        max_fetches: int = 16,
        timeout_s: float = 10.0,
        max_redirects: int = 3,
        resolve: Resolver | None = None,
        may_connect: Callable[[str], bool] = is_public,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._hosts = (_AnyHost(),) if allowed_hosts is None else tuple(map(_AllowedHost, allowed_hosts))
        self._turns = asyncio.Semaphore(max_fetches)
        self._timeout_s = timeout_s
        self._max_redirects = max_redirects
        self._resolve = resolve or _SystemResolver(max_fetches)
        self._may_connect = may_connect
        self._tls = tls or ssl.create_default_context()

    async def fetch(self, url: str, max_bytes: int, hold: Callable[[int], None]) -> bytes:
        """The bytes behind a URL. Raises RequestError for everything that is not allowed or goes wrong.

        The time runs from its turn on: waiting for one is no fault of the host.
        """
        if not self._hosts:
            raise RequestError(
                FIELD, "fetching from URLs is off on this server; send the picture as base64, or allow its host"
            )
        body = _Body(max_bytes, hold)
        try:
            async with self._turns:
                await asyncio.wait_for(self._follow(_parse(url), body), self._timeout_s)
            return body.taken()
        except (asyncio.TimeoutError, httpx.TimeoutException):
            raise RequestError(FIELD, f"the host did not deliver within {self._timeout_s:g} s") from None
        except httpx.HTTPError as error:
            raise RequestError(FIELD, f"the host could not be reached ({type(error).__name__})") from None

    async def _follow(self, url: httpx.URL, body: _Body) -> None:
        # Kept-alive connections are known by address only, and another name's certificate would go unchecked.
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(
            verify=self._tls, trust_env=False, limits=limits, timeout=self._timeout_s
        ) as client:
            for _ in range(self._max_redirects + 1):
                target = await self._get(client, url, body)
                if target is None:
                    return
                url = target
        raise RequestError(FIELD, f"was redirected more than {self._max_redirects} times")

    async def _get(self, client: httpx.AsyncClient, url: httpx.URL, body: _Body) -> httpx.URL | None:
        """Reads the picture; or says where to look instead."""
        addresses = await self._checked_addresses(url)
        for address in addresses:
            try:
                response = await client.send(_request_to(client, url, address), stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                if address == addresses[-1]:
                    raise
                continue
            try:
                if response.status_code in REDIRECTS:
                    return _redirect_target(url, response)
                _require_picture(response)
                await body.read(response)
                return None
            finally:
                await response.aclose()
        raise AssertionError("a checked name has at least one address")

    async def _checked_addresses(self, url: httpx.URL) -> Sequence[str]:
        host, port = _host(url), url.port or PORTS[url.scheme]
        if not any(allowed.matches(host, port) for allowed in self._hosts):
            raise RequestError(FIELD, f"the host {shown(f'{host}:{port}')} is not allowed on this server")
        try:
            addresses = await self._resolve(host, port)
        except (OSError, UnicodeError):
            addresses = ()
        if not addresses:
            raise RequestError(FIELD, f"the host {shown(host)} has no address")
        if not all(self._may_connect(address) for address in addresses):
            raise RequestError(FIELD, f"the host {shown(host)} has an address that is not public")
        return addresses


class _Body:
    """A picture while it arrives: never more than its limit in memory, and all of it accounted for."""

    def __init__(self, max_bytes: int, hold: Callable[[int], None]) -> None:
        self._max_bytes = max_bytes
        self._hold = hold
        self._num_bytes = 0
        self._pieces: list[bytes] = []

    async def read(self, response: httpx.Response) -> None:
        declared = response.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self._max_bytes:
            raise self._too_large()
        async for piece in response.aiter_raw():
            self._num_bytes += len(piece)
            if self._num_bytes > self._max_bytes:
                raise self._too_large()
            self._hold(len(piece))
            self._pieces.append(piece)

    def taken(self) -> bytes:
        return b"".join(self._pieces)

    def _too_large(self) -> RequestError:
        limit = f"{self._max_bytes} bytes (max_image_bytes)"
        return RequestError(FIELD, f"the picture has more than {limit}; send a smaller one")


class _AnyHost:
    def matches(self, host: str, port: int) -> bool:
        return port in PORTS.values()


class _AllowedHost:
    def __init__(self, entry: str) -> None:
        name, _, port = entry.strip().lower().partition(":")
        self._is_wildcard = name.startswith("*.")
        self._name = name.removeprefix("*.").rstrip(".")
        labels = self._name.split(".")
        is_sound = all(label.isascii() and label.replace("-", "").replace("_", "").isalnum() for label in labels)
        if not is_sound or (port and not port.isdecimal()) or (self._is_wildcard and len(labels) < 2):
            raise ConfigError(
                "allowed_image_hosts",
                f"{shown(entry)} is not a host; write a name (xn-- form), *.example.org or name:port",
            )
        self._ports = {int(port)} if port else set(PORTS.values())

    def matches(self, host: str, port: int) -> bool:
        is_named = host.endswith("." + self._name) if self._is_wildcard else host == self._name
        return is_named and port in self._ports


def _parse(url: str) -> httpx.URL:
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError):
        raise RequestError(FIELD, f"{shown(url)} is not a URL") from None
    if parsed.scheme not in PORTS:
        raise RequestError(FIELD, f"must be http, https or base64 (got the scheme {shown(parsed.scheme)})")
    if not parsed.host or parsed.userinfo:
        raise RequestError(FIELD, "must name a host and no user")
    return parsed


def _host(url: httpx.URL) -> str:
    """As it goes over the wire: lower case, international names encoded, no final dot."""
    return url.raw_host.decode("ascii").lower().rstrip(".")


def _request_to(client: httpx.AsyncClient, url: httpx.URL, address: str) -> httpx.Request:
    host = _host(url)
    headers = {**REQUEST_HEADERS, "host": host if url.port is None else f"{host}:{url.port}"}
    return client.build_request(
        "GET", url.copy_with(host=address, fragment=None), headers=headers, extensions={"sni_hostname": host}
    )


def _redirect_target(url: httpx.URL, response: httpx.Response) -> httpx.URL:
    location = response.headers.get("location", "")
    try:
        target = _parse(str(url.join(location)))
    except httpx.InvalidURL:
        raise RequestError(FIELD, "was redirected to something that is not a URL") from None
    if url.scheme == "https" and target.scheme == "http":
        raise RequestError(FIELD, "was redirected from https to http")
    return target


def _require_picture(response: httpx.Response) -> None:
    """The kind is only a first sieve: what the bytes are is found out by decoding them."""
    if response.status_code != 200:
        raise RequestError(FIELD, f"the host answered with status {response.status_code}")
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind and not kind.startswith("image/") and kind not in ("application/octet-stream", "binary/octet-stream"):
        raise RequestError(FIELD, f"is not a picture: the host gives its type as {shown(kind)}")
    if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise RequestError(FIELD, "the host sent it compressed; only plain picture files are read")
