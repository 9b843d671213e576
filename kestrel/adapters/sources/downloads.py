"""Downloads over HTTPS: whole or not at all, within limits of time and size, and with errors that are types.

Messages name neither URLs nor keys: a presigned URL is a secret like a key. Plain http is for the own machine only.
Proxies of the environment are honoured; cookies and .netrc files are not.
"""

from __future__ import annotations

import ipaddress
import json
import ssl
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from kestrel.adapters.sources.disk_cache import NoRoom, PartialFile
from kestrel.errors import (
    AdapterGone,
    AdapterNotFound,
    AdapterSourceBusy,
    AdapterSourceDenied,
    AdapterSourceError,
    AdapterSourceTimeout,
)
from kestrel.threads import Threads

MAX_DOWNLOADS_AT_ONCE = 4
REDIRECTS = frozenset({301, 302, 303, 307, 308})
MAX_REDIRECTS = 3
MAX_JSON_BYTES = 2**16
PLAIN_HEADERS = {"accept-encoding": "identity", "user-agent": "kestrel"}
_WRITTEN_AT_ONCE = 2**20


@dataclass(frozen=True, slots=True)
class DownloadLimits:
    max_bytes: int = 4 * 2**30
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 30.0
    """Longest silence in the middle of a download."""
    total_timeout_s: float = 900.0


class Downloader:
    """Speaks for one source, whose name stands in the messages."""

    def __init__(self, who: str, limits: DownloadLimits, when_denied: str) -> None:
        """`when_denied` tells the operator what to check when access is denied."""
        self._who = who
        self._when_denied = when_denied
        self._limits = limits
        self._timeout = httpx.Timeout(limits.read_timeout_s, connect=limits.connect_timeout_s)
        self._tls: ssl.SSLContext | None = None
        self.threads = Threads("adapter-downloads", MAX_DOWNLOADS_AT_ONCE)
        """For what downloads write; whoever looks for files that are there must not wait behind it."""

    async def json(self, url: httpx.URL, headers: Mapping[str, str], adapter: str) -> Any:
        """A small JSON document. Redirects are refused: the headers may hold a key."""
        async with self._answer(url, headers, adapter) as response:
            if response.status_code in REDIRECTS:
                raise self.failure(adapter, "answered with a redirect; check its address")
            self._require_ok(response, adapter)
            body = bytearray()
            async for piece in response.aiter_raw():
                body += piece
                if len(body) > MAX_JSON_BYTES:
                    raise self.failure(adapter, f"answered with more than {MAX_JSON_BYTES} bytes of JSON")
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise self.failure(adapter, "answered with something that is not JSON") from None

    async def file(self, url: httpx.URL, target: PartialFile, adapter: str) -> str:
        """Writes the contents to `target` and gives their SHA-256. No header of the caller is sent."""
        for _ in range(MAX_REDIRECTS + 1):
            async with self._answer(url, {}, adapter) as response:
                if response.status_code not in REDIRECTS:
                    self._require_ok(response, adapter)
                    return await self._write(response, target, adapter)
                url = self._redirect_target(url, response, adapter)
        raise self.failure(adapter, f"redirected more than {MAX_REDIRECTS} times")

    def failure(self, adapter: str, what: str) -> AdapterSourceError:
        return AdapterSourceError(f"adapter '{adapter}': {self._who} {what}")

    def checked_url(self, text: object, named_by: httpx.URL, adapter: str) -> httpx.URL:
        """A URL that an answer named. What came over https never leads to http, not even on the own machine."""
        url = parsed_url(text)
        if url is None or (named_by.scheme == "https" and url.scheme != "https"):
            raise self.failure(adapter, "named an address that is not https")
        return url

    @asynccontextmanager
    async def _answer(self, url: httpx.URL, headers: Mapping[str, str], adapter: str) -> AsyncIterator[httpx.Response]:
        """An open response. Below httpx's client, which would write every URL to its log."""
        request = httpx.Request(
            "GET", url, headers={**PLAIN_HEADERS, **headers}, extensions={"timeout": self._timeout.as_dict()}
        )
        try:
            async with await self._transport(url, adapter) as transport:
                response = await transport.handle_async_request(request)
                try:
                    yield response
                finally:
                    await response.aclose()
        except httpx.TimeoutException:
            raise AdapterSourceTimeout(
                f"adapter '{adapter}': {self._who} did not answer in time; retry later"
            ) from None
        except httpx.HTTPError as error:
            what = f"could not be reached, or broke off ({type(error).__name__}); retry later"
            raise self.failure(adapter, what) from None

    async def _transport(self, url: httpx.URL, adapter: str) -> httpx.AsyncHTTPTransport:
        if url.scheme == "https" and self._tls is None:
            self._tls = await self.threads.run(httpx.create_ssl_context)  # reads all certificates
        try:
            return httpx.AsyncHTTPTransport(verify=self._tls or False, trust_env=False, proxy=_proxy_for(url))
        except (ImportError, ValueError):  # ImportError: a SOCKS proxy without the package for it
            raise self.failure(adapter, f"cannot be reached through the proxy of {url.scheme}_proxy") from None

    async def _write(self, response: httpx.Response, target: PartialFile, adapter: str) -> str:
        text = response.headers.get("content-length", "")
        declared = int(text[:20]) if text.isdecimal() else 0
        if declared > self._limits.max_bytes:
            raise self._too_large(adapter)
        try:
            await self.threads.run(target.start, declared)
            waiting = bytearray()
            async for piece in response.aiter_raw():
                waiting += piece
                if target.num_bytes + len(waiting) > self._limits.max_bytes:
                    raise self._too_large(adapter)
                if len(waiting) >= _WRITTEN_AT_ONCE:
                    await self.threads.run(target.write, bytes(waiting))
                    waiting.clear()
            return await self.threads.run(target.finish, bytes(waiting))
        except NoRoom as error:
            kind = AdapterSourceBusy if error.may_pass else AdapterSourceError
            raise kind(f"adapter '{adapter}': its file {error}") from None

    def _too_large(self, adapter: str) -> AdapterSourceError:
        return self.failure(adapter, f"has a file of more than {self._limits.max_bytes} bytes, which is not taken")

    def _redirect_target(self, url: httpx.URL, response: httpx.Response, adapter: str) -> httpx.URL:
        try:
            target = url.join(response.headers.get("location", ""))
        except httpx.InvalidURL:
            raise self.failure(adapter, "redirected to something that is not a URL") from None
        return self.checked_url(str(target), url, adapter)

    def _require_ok(self, response: httpx.Response, adapter: str) -> None:
        status = response.status_code
        if status == 200:
            if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
                raise self.failure(adapter, "answered in a compressed form, although asked for a plain one")
            return
        start = f"adapter '{adapter}': {self._who}"
        if status == 404:
            raise AdapterNotFound(f"{start} does not know it; check the id and the step")
        if status == 410:
            raise AdapterGone(f"{start} has removed it; use another step")
        if status in (401, 403):
            raise AdapterSourceDenied(f"{start} denied access (status {status}); check {self._when_denied}")
        if status in (429, 503):
            raise AdapterSourceBusy(f"{start} is busy (status {status}); retry later")
        raise AdapterSourceError(f"{start} failed (status {status}); retry later")


def parsed_url(text: object) -> httpx.URL | None:
    """An https URL with a host and no user in it; http only for the own machine."""
    if not isinstance(text, str):
        return None
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        return None
    if not url.host or url.userinfo:
        return None
    return url if url.scheme == "https" or (url.scheme == "http" and _is_loopback(url.host)) else None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _proxy_for(url: httpx.URL) -> str | None:
    if _is_loopback(url.host) or urllib.request.proxy_bypass(url.host):
        return None
    return urllib.request.getproxies().get(url.scheme)
