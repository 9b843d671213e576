"""Pictures as requests carry them: a base64 data URL, raw base64, or a URL that the operator allows."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Protocol

from kestrel.errors import RequestError, shown
from kestrel.images.base64_text import base64_payload, decode_base64, require_decodable
from kestrel.threads import Threads

LARGE_TEXT = 2**20
"""Base64 from this length on is decoded off the event loop."""
_WEB_URL = re.compile(r"https?://", re.IGNORECASE)


class ImageFetcher(Protocol):
    """Fetches pictures from hosts that the operator allows."""

    async def fetch(self, url: str, max_bytes: int, hold: Callable[[int], None]) -> bytes:
        """`hold` is told of bytes as they arrive, and may refuse them."""
        ...


class NoRemoteImages:
    """The fetcher of a server that fetches nothing."""

    async def fetch(self, url: str, max_bytes: int, hold: Callable[[int], None]) -> bytes:
        raise RequestError("image_url", "web addresses are not fetched here; send the picture as a base64 data URL")


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
    if len(value) < LARGE_TEXT:
        return _decoded(value, max_bytes, field)
    return await threads.run(_decoded, value, max_bytes, field)


def _decoded(value: str, max_bytes: int, field: str) -> bytes:
    payload = base64_payload(value, field)
    require_decodable(payload, max_bytes, field)
    return decode_base64(payload, field)
