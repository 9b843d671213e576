"""Pictures as text: base64, bare or in a data URL.

A picture may be tens of megabytes of text. Each call gets a slice of it, because a call holds the GIL.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator

import pybase64

from kestrel.errors import RequestError

_DATA_URL = re.compile(r"data:([^,;]{0,100})((?:;[^,;]{0,100}){0,8}),", re.IGNORECASE)
_BLANKS = bytes(code for code in range(128) if chr(code).isspace())
MAX_LAST_DIGITS = 64
SLICE_DIGITS = 2**20
"""Digits of one call; a multiple of four, which are three bytes."""


def base64_start(value: str, field: str) -> int:
    """Where the base64 in a text begins. The media type of a data URL is not used: the bytes say what they are."""
    if value[:5].lower() != "data:":
        return 0
    head = _DATA_URL.match(value)
    if head is None:
        raise RequestError(field, "is no data URL; write data:image/png;base64, and then the data")
    if "base64" not in head.group(2).lower().split(";"):
        raise RequestError(field, "is a data URL without base64; write data:image/png;base64, and then the data")
    return head.end()


def require_decodable(text: str, max_bytes: int, field: str, start: int = 0) -> None:
    """Refuse, before it is decoded, what would be larger than `max_bytes`."""
    if _num_bytes(len(text) - start) > max_bytes + 2 and _num_bytes(_num_digits(text, field, start)) > max_bytes + 2:
        raise RequestError(field, f"the picture exceeds {max_bytes} bytes (max_image_bytes); send a smaller one")


def decode_base64(text: str, field: str, start: int = 0) -> bytes:
    """Strict: every character counts, and so does the padding; blanks and line breaks between them do not."""
    try:
        data = _decode_digits(text, start, len(text))
    except (binascii.Error, ValueError):
        data = _decode_leniently(text, field, start)
    if not data:
        raise RequestError(field, "holds no data; send a picture")
    return data


def _num_bytes(num_digits: int) -> int:
    return num_digits // 4 * 3


def _decode_digits(digits: str | memoryview, start: int, end: int) -> bytes:
    """Raises ValueError for anything but digits, and padding at the end."""
    slices: list[bytes] = []
    for at in range(start, end, SLICE_DIGITS):
        until = min(at + SLICE_DIGITS, end)
        decoded = pybase64.b64decode(digits[at:until], validate=True)
        if until < end and len(decoded) != _num_bytes(SLICE_DIGITS):
            raise ValueError("padding in the middle")
        slices.append(decoded)
    return b"".join(slices)


def _decode_leniently(text: str, field: str, start: int) -> bytes:
    """With blanks, and with more padding than is needed, of which the slow decoder sees the last digits alone."""
    digits = b"".join(_without_blanks(text, field, start))
    last = digits[-MAX_LAST_DIGITS - 4 :]
    at = max((len(digits) - len(last) + len(last.rstrip(b"="))) // 4 * 4 - 4, 0)
    try:
        if len(digits) - at > MAX_LAST_DIGITS:
            raise ValueError("no end of padding")
        body = _decode_digits(memoryview(digits), 0, at)
        if len(body) != _num_bytes(at):
            raise ValueError("padding in the middle")
        return b"".join([body, base64.b64decode(digits[at:], validate=True)])
    except (binascii.Error, ValueError):
        raise _not_base64(field) from None


def _num_digits(text: str, field: str, start: int) -> int:
    return sum(map(len, _without_blanks(text, field, start)))


def _without_blanks(text: str, field: str, start: int) -> Iterator[bytes]:
    for at in range(start, len(text), SLICE_DIGITS):
        try:
            yield text[at : at + SLICE_DIGITS].encode("ascii").translate(None, _BLANKS)
        except UnicodeEncodeError:
            raise _not_base64(field) from None


def _not_base64(field: str) -> RequestError:
    return RequestError(field, "is not base64, or is cut off; encode the whole picture file")
