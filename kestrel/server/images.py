"""Pictures as requests carry them: a base64 data URL, raw base64, or a URL that the operator allows."""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from typing import Protocol

from kestrel.errors import RequestError, shown

LARGE_TEXT = 2**16
"""Base64 from this length on is decoded off the event loop."""
_DATA_URL = re.compile(r"data:([^,;]{0,100})((?:;[^,;]{0,100}){0,8}),", re.IGNORECASE)
_WEB_URL = re.compile(r"https?://", re.IGNORECASE)
_BLANKS = re.compile(r"\s+")


class ImageFetcher(Protocol):
    """Fetches pictures from hosts that the operator allows."""

    async def fetch(self, url: str) -> bytes: ...


class NoRemoteImages:
    """The fetcher of a server that fetches nothing."""

    async def fetch(self, url: str) -> bytes:
        raise RequestError("image_url", "web addresses are not fetched here; send the picture as a base64 data URL")


async def image_bytes(value: object, max_bytes: int, fetcher: ImageFetcher, field: str = "image_url") -> bytes:
    """The encoded picture. The media type of a data URL is not used: the bytes say what they are."""
    if not isinstance(value, str):
        raise RequestError(field, f"must be a base64 data URL or raw base64 as text (got {shown(value)})")
    if _WEB_URL.match(value):
        return await fetcher.fetch(value)
    payload = _payload(value, field)
    if len(payload) // 4 * 3 > max_bytes + 2 and len(_BLANKS.sub("", payload)) // 4 * 3 > max_bytes + 2:
        raise RequestError(field, f"the picture exceeds {max_bytes} bytes (max_image_bytes); send a smaller one")
    if len(payload) < LARGE_TEXT:
        return decode_base64(payload, field)
    return await asyncio.to_thread(decode_base64, payload, field)


def _payload(value: str, field: str) -> str:
    if value[:5].lower() != "data:":
        return value
    head = _DATA_URL.match(value)
    if head is None:
        raise RequestError(field, "is no data URL; write data:image/png;base64, and then the data")
    if "base64" not in head.group(2).lower().split(";"):
        raise RequestError(field, "is a data URL without base64; write data:image/png;base64, and then the data")
    return value[head.end() :]


def decode_base64(text: str, field: str) -> bytes:
    """Strict: every character counts, and so does the padding; blanks and line breaks between them do not."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        try:
            data = base64.b64decode(_BLANKS.sub("", text), validate=True)
        except (binascii.Error, ValueError):
            raise RequestError(field, "is not base64, or is cut off; encode the whole picture file") from None
    if not data:
        raise RequestError(field, "holds no data; send a picture")
    return data
