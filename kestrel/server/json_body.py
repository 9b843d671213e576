"""The JSON object in a request's body, read whole and without guessing what an ambiguous one means."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any, AnyStr

import orjson
from starlette.requests import Request

from kestrel.errors import RequestError, shown
from kestrel.server.errors import ClientGone, UnsupportedEncoding
from kestrel.server.headers import header_of

LARGE_BODY_BYTES = 2**18
"""Bodies from here on are parsed off the event loop."""
MANY = 64
"""A body with so many brackets or colons is not checked by counting."""


async def read_object(request: Request) -> dict[str, object]:
    """The JSON object in the body. Whatever else it holds is a RequestError."""
    encoding = (header_of(request.scope, b"content-encoding") or "").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedEncoding(f"the body's Content-Encoding is {shown(encoding)}; send plain JSON")
    chunks: list[bytes] = []
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunks.append(message.get("body", b""))
        more = message.get("more_body", False)
    body = b"".join(chunks)
    is_large = len(body) > LARGE_BODY_BYTES
    value = await asyncio.to_thread(parse_json, body) if is_large else parse_json(body)
    if not isinstance(value, dict):
        raise RequestError("body", f"must be a JSON object (got {_kind(value)})")
    return value


def parse_json(body: bytes) -> object:
    if not body.strip():
        raise RequestError("body", "is empty; send a JSON object")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError("body", f"is not JSON: {error.msg} at character {error.pos}") from None
    if not _has_each_key_once(body, value):
        _refuse_repeated_keys(body)
    return value


def _has_each_key_once(body: bytes, value: object) -> bool:
    """Whether it is sure that no key was given twice; False is not sure.

    Without escapes, the colons of a body are those after its keys and those within its texts. If the parsed value
    accounts for all of them, no entry was dropped. Bodies with many marks, which may nest, are left to the second pass.
    """
    if b"\\" in body or any(_num_found(body, mark) == MANY for mark in (b"{", b"[", b":")):
        return False
    return _num_found(body, b":") == _num_colons(value)


def _num_colons(value: object) -> int:
    if isinstance(value, str):
        return _num_found(value, ":")
    if isinstance(value, dict):
        return sum(1 + _num_colons(key) + _num_colons(inner) for key, inner in value.items())
    if isinstance(value, list):
        return sum(map(_num_colons, value))
    return 0


def _num_found(where: AnyStr, mark: AnyStr) -> int:
    """Up to MANY. Leaps from one to the next, where `count` looks at every character of a picture."""
    at = where.find(mark)
    times = 0
    while at >= 0 and times < MANY:
        times += 1
        at = where.find(mark, at + 1)
    return times


def _refuse_repeated_keys(body: bytes) -> None:
    """Of a key given twice orjson takes the last and says nothing; a proxy's parser may take the first.

    A second pass, whose cost in Python is per object and not per character: a picture in base64 is scanned in C.
    Numbers are read as floats because those never fail, however many digits they have.
    """
    try:
        json.loads(body, object_pairs_hook=_each_key_once, parse_int=float)
    except RecursionError:
        raise RequestError("body", "nests too deeply; flatten it") from None


def _each_key_once(pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) == len(pairs):
        return
    times = Counter(key for key, _ in pairs)
    repeated = next(key for key, count in times.items() if count > 1)
    raise RequestError("body", f"the key {shown(repeated)} is given twice in one object; give it once")


def _kind(value: object) -> str:
    return {list: "a list", str: "a text", bool: "a truth value", type(None): "null"}.get(type(value), "a number")
