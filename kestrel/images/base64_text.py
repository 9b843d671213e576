"""Pictures as text: base64, bare or in a data URL."""

from __future__ import annotations

import base64
import binascii
import re

import pybase64

from kestrel.errors import RequestError

_DATA_URL = re.compile(r"data:([^,;]{0,100})((?:;[^,;]{0,100}){0,8}),", re.IGNORECASE)
_BLANKS = bytes(code for code in range(128) if chr(code).isspace())
MOST_LAST_DIGITS = 64


def base64_payload(value: str, field: str) -> str:
    """The base64 in a text. The media type of a data URL is not used: the bytes say what they are."""
    if value[:5].lower() != "data:":
        return value
    head = _DATA_URL.match(value)
    if head is None:
        raise RequestError(field, "is no data URL; write data:image/png;base64, and then the data")
    if "base64" not in head.group(2).lower().split(";"):
        raise RequestError(field, "is a data URL without base64; write data:image/png;base64, and then the data")
    return value[head.end() :]


def require_decodable(payload: str, max_bytes: int, field: str) -> None:
    """Refuse, before it is decoded, what would be larger than `max_bytes`."""
    if len(payload) // 4 * 3 > max_bytes + 2 and len(_without_blanks(payload, field)) // 4 * 3 > max_bytes + 2:
        raise RequestError(field, f"the picture exceeds {max_bytes} bytes (max_image_bytes); send a smaller one")


def decode_base64(text: str, field: str) -> bytes:
    """Strict: every character counts, and so does the padding; blanks and line breaks between them do not."""
    try:
        data = pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        data = _decode_leniently(text, field)
    if not data:
        raise RequestError(field, "holds no data; send a picture")
    return data


def _decode_leniently(text: str, field: str) -> bytes:
    """With blanks, and with more padding than is needed, of which the slow decoder sees the last digits alone."""
    digits = _without_blanks(text, field)
    at = max(len(digits.rstrip(b"=")) // 4 * 4 - 4, 0)
    body, end = digits[:at], digits[at:]
    try:
        if b"=" in body or len(end) > MOST_LAST_DIGITS:
            raise ValueError("padding in the middle, or no end of it")
        return pybase64.b64decode(body, validate=True) + base64.b64decode(end, validate=True)
    except (binascii.Error, ValueError):
        raise _not_base64(field) from None


def _without_blanks(text: str, field: str) -> bytes:
    try:
        return text.encode("ascii").translate(None, _BLANKS)
    except UnicodeEncodeError:
        raise _not_base64(field) from None


def _not_base64(field: str) -> RequestError:
    return RequestError(field, "is not base64, or is cut off; encode the whole picture file")
