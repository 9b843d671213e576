"""The JSON object in a request's body, read whole and without guessing what an ambiguous one means."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, AnyStr

import orjson
from starlette.requests import Request

from kestrel.errors import RequestError, shown
from kestrel.server.errors import ClientGone, UnsupportedEncoding
from kestrel.server.headers import header_of
from kestrel.server.state import state_of

LARGE_BODY_BYTES = 2**18
"""Bodies from here on are counted before they are parsed, and parsed off the event loop."""
WEIGHTS = ((b",", 1), (b'"', 1), (b"\\", 1), (b":", 8), (b"[", 16), (b"{", 16))
"""What the signs of JSON cost to parse, in numbers of a list; the parser holds the interpreter meanwhile."""
SLICE_BYTES = 2**20
"""What is counted at a time; in between other threads get their turn."""
NAMED_BYTES = 2**22
"""Of larger bodies a key that is given twice is not named: looking for it holds the interpreter."""
FEW = 64
_NUMBERS = frozenset({int, float})


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
    state = state_of(request)
    if sum(map(len, chunks)) > LARGE_BODY_BYTES:
        value = await state.body_threads.run(_parse_large, chunks, state.config.max_body_values)
    else:
        value = parse_json(b"".join(chunks))
    if not isinstance(value, dict):
        raise RequestError("body", f"must be a JSON object (got {_kind(value)})")
    return value


def _parse_large(chunks: list[bytes], max_values: int) -> object:
    body = b"".join(chunks)
    require_few_values(body, max_values)
    return parse_json(body)


def require_few_values(body: bytes, max_values: int) -> None:
    """Refuse a body that would be slow to parse. Signs within texts count too: telling them apart is parsing."""
    cost = 0
    for at in range(0, len(body), SLICE_BYTES):
        cost += sum(weight * body.count(sign, at, at + SLICE_BYTES) for sign, weight in WEIGHTS)
        if cost > max_values:
            raise RequestError(
                "body",
                f"holds more than {max_values} numbers, or texts, keys, lists and objects that count as several "
                "(max_body_values); send less at once",
            )


def parse_json(body: bytes) -> object:
    if not body.strip():
        raise RequestError("body", "is empty; send a JSON object")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError("body", f"is not JSON: {error.msg} at character {error.pos}") from None
    if _num_found(body, b":") != _num_colons(value) - _num_escaped_colons(body):
        _refuse_repeated_keys(body)
    return value


def _num_colons(value: object) -> int:
    """Those after keys and those within texts. A body has as many, but for escapes, unless a key was dropped."""
    pending, num_colons = [value], 0
    while pending:
        one = pending.pop()
        if isinstance(one, str):
            num_colons += _num_found(one, ":")
        elif isinstance(one, dict):
            num_colons += len(one)
            pending += one
            pending += one.values()
        elif isinstance(one, list) and not _NUMBERS.issuperset(map(type, one)):
            pending += one
    return num_colons


def _num_escaped_colons(body: bytes) -> int:
    if b"\\u003" not in body:
        return 0
    body = body.replace(b"\\\\", b"")  # a backslash that is itself escaped begins nothing
    return body.count(b"\\u003a") + body.count(b"\\u003A")


def _num_found(where: AnyStr, mark: AnyStr) -> int:
    """Leaps from one to the next while they are few, where `count` looks at every character of a picture."""
    at, times = where.find(mark), 0
    while at >= 0 and times < FEW:
        times += 1
        at = where.find(mark, at + 1)
    return times if at < 0 else times + where.count(mark, at)


def _refuse_repeated_keys(body: bytes) -> None:
    """Of a key given twice orjson takes the last and says nothing; a proxy's parser may take the first.

    A second pass finds its name. Numbers are read as floats because those never fail, however many digits they have.
    """
    if len(body) > NAMED_BYTES:
        raise RequestError("body", "gives a key twice in one object; give each once")
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
