"""The JSON object in a request's body, read whole and without guessing what an ambiguous one means."""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, AnyStr

import orjson
from starlette.requests import Request
from starlette.types import Scope

from kestrel.errors import RequestError, shown
from kestrel.server.errors import ClientGone, NotJson, UnsupportedEncoding
from kestrel.server.records import header_of, route_path
from kestrel.server.state import state_of
from kestrel.threads import Pace

FORM = "multipart/form-data"
URL_ENCODED = "application/x-www-form-urlencoded"
"""What curl calls the data of -d, whatever it is."""
FORM_PATHS = ("/v1/query", "/v1/caption", "/v1/point", "/v1/detect", "/v1/segment")
LARGE_BODY_BYTES = 2**18
"""Bodies from here on are counted before they are parsed, and parsed in pieces off the event loop."""
MANY_SIGNS = 2**10
"""So are smaller ones with more texts, lists or objects than this."""
WEIGHTS = ((b",", 1.0), (b'"', 2.0), (b"\\", 0.5), (b":", 10.0), (b"[", 12.0), (b"{", 8.0))
"""What the signs of JSON cost to parse, in numbers of a list: about 20 ns each at 2.5 GHz. No shape costs more than 1.6
times what it weighs (tests/server/test_large_bodies.py)."""
BYTES_PER_VALUE = 8
"""Bytes that cost as much as a number: the digits of numbers, the characters of texts, blanks."""
SLICE_BYTES = 2**20
"""What is counted in one call; in between other threads get the GIL."""
NAMED_BYTES = 2**18
"""Of larger bodies, without their long texts, a key that is given twice is not named: one call would look for it."""
PIECE_BYTES = 2**16
"""Of a long text, parsed in one call; small enough that its copies stay in a processor's cache."""
GROWTH_CHARACTERS = 2**20
"""By which a long text grows at a time."""
RUN_BYTES = 2**10
"""A stretch of a text that holds a block of this size, and no quotation mark, is parsed apart."""
SEARCH_BYTES = 2**16
"""Looked through in one call for a place between escapes."""
MAX_WIDE_CHARACTERS = 2**22
"""Of a text with characters beyond ASCII. One of them can make every character four bytes wide, copied in one call."""
SLICE_ENTRIES = 2**13
"""Of a list, whose types are looked at in one call."""
NO_OPEN_ESCAPE = re.compile(rb"[^\\]{12}|[^\\](?=\\(?:[^u]|u[^dD]|u[dD][^c-fC-F]))")
"""Behind it no escape is open: as long as the longest, a pair of surrogates; or right before one begins that is not the
second of a pair."""
FEW = 64
_NUMBERS = frozenset({int, float})


def content_type(scope: Scope) -> str:
    """Without its parameters."""
    return (header_of(scope, b"content-type") or "").partition(";")[0].strip().lower()


def is_form(scope: Scope) -> bool:
    return content_type(scope) == FORM


def how_to_send(scope: Scope) -> str:
    """The remedy for a body that is not JSON, or not declared as JSON."""
    remedy = "send JSON with Content-Type: application/json"
    if content_type(scope) != URL_ENCODED or route_path(scope) not in FORM_PATHS:
        return remedy
    return f"{remedy}, or a form (with curl: -F question=… in place of -d question=…)"


async def read_object(request: Request) -> dict[str, object]:
    """The JSON object in the body. Whatever else it holds is a RequestError."""
    if is_form(request.scope):
        raise NotJson(
            f"{route_path(request.scope)} takes no form; send JSON with Content-Type: application/json "
            f"(forms are for {', '.join(FORM_PATHS[:-1])} and {FORM_PATHS[-1]})"
        )
    chunks = [chunk async for chunk in body_chunks(request)]
    try:
        value = await parse_chunks(request, chunks)
    except RequestError as error:
        if content_type(request.scope) != URL_ENCODED:
            raise
        raise RequestError("body", f"{str(error).removeprefix('body: ')}; {how_to_send(request.scope)}") from None
    if not isinstance(value, dict):
        raise RequestError("body", f"must be a JSON object (got {_kind(value)})")
    return value


async def body_chunks(request: Request) -> AsyncIterator[bytes]:
    """The body as it arrives."""
    encoding = (header_of(request.scope, b"content-encoding") or "").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedEncoding(f"the body's Content-Encoding is {shown(encoding)}; send it plain")
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        yield message.get("body", b"")
        more = message.get("more_body", False)


async def parse_chunks(request: Request, chunks: list[bytes]) -> object:
    """JSON in pieces, off the event loop if there is much of it."""
    state = state_of(request)
    if sum(map(len, chunks)) > LARGE_BODY_BYTES or _has_many_signs(chunks):
        return await state.body_threads.run(_parse_large, chunks, state.config.max_body_values)
    return parse_json(b"".join(chunks))


def _has_many_signs(chunks: list[bytes]) -> bool:
    """Leaps from one to the next: a picture has none of them."""
    for sign in (b'"', b"[", b"{"):
        num_found = 0
        for chunk in chunks:
            at = chunk.find(sign)
            while at >= 0:
                num_found += 1
                if num_found > MANY_SIGNS:
                    return True
                at = chunk.find(sign, at + 1)
    return False


def _parse_large(chunks: list[bytes], max_values: int) -> object:
    return parse_in_pieces(b"".join(chunks), max_values)


def cost_of(body: bytes) -> float:
    """What it costs to parse, in numbers. Signs within texts count too: telling them apart is parsing."""
    cost, pace = len(body) / BYTES_PER_VALUE, Pace()
    for at in range(0, len(body), SLICE_BYTES):
        cost += sum(weight * body.count(sign, at, at + SLICE_BYTES) for sign, weight in WEIGHTS)
        pace.rest()
    return cost


def _require_few(cost: float, max_values: float) -> None:
    if cost > max_values:
        raise RequestError(
            "body",
            f"costs as much to parse as more than {max_values} numbers (max_body_values); texts, keys, lists and "
            "objects count as several, and so do many bytes besides long texts; send less in one request",
        )


def parse_json(body: bytes, has_marks: bool = False) -> object:
    """`has_marks`: it is not what was sent, so that no place in it can be named."""
    if not body.strip():
        raise RequestError("body", "is empty; send a JSON object")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        where = "" if has_marks else f" at character {error.pos}"
        raise RequestError("body", f"is not JSON: {error.msg}{where}") from None
    if _num_found(body, b":") != _num_colons(value) - _num_escaped_colons(body):
        _refuse_repeated_keys(body)
    return value


# ---------------------------------------------------------------------- long texts


def parse_in_pieces(body: bytes, max_values: int) -> object:
    """As `parse_json`, for a thread of its own, in calls that hold the GIL for some 10 ms at most: long texts are cut
    out, parsed piece by piece with rests, and put back. The rest goes to one call, so it is counted first."""
    nonce = secrets.token_hex(8)
    parts, runs = _cut_runs(body, nonce)
    rest = b"".join(parts)
    _require_few(cost_of(rest), max_values)
    value = parse_json(rest, has_marks=bool(runs))
    return value if not runs else _put_back(value, nonce, [_text_of(body, start, end) for start, end in runs])


def _cut_runs(body: bytes, nonce: str) -> tuple[list[bytes], list[tuple[int, int]]]:
    """The body in parts, with marks in place of the long stretches of its texts, and where those were."""
    parts: list[bytes] = []
    runs: list[tuple[int, int]] = []
    at, next_block, is_inside = 0, 0, False
    for block in range(0, len(body) - RUN_BYTES, RUN_BYTES):
        if block < next_block or body.find(b'"', block, block + RUN_BYTES) >= 0:
            continue
        start, quote = body.rfind(b'"', at, block) + 1, body.find(b'"', block)
        if quote < 0:
            break
        next_block = quote  # nothing is looked through twice, however few quotation marks there are
        if start == 0:
            continue
        end = _before_backslashes(body, start, quote)  # they may belong to an escaped quotation mark
        is_inside ^= _num_quotes(body[at:start]) % 2 == 1
        parts.append(body[at:start])
        if is_inside:
            parts.append(b"%s-%d;" % (nonce.encode(), len(runs)))
            runs.append((start, end))
        else:
            parts.append(body[start:end])
        at = end
    return [*parts, body[at:]], runs


def _num_quotes(part: bytes) -> int:
    """Those that begin or end a text. No escape is cut by the ends of the part."""
    part = part.replace(b"\\\\", b"")
    return part.count(b'"') - part.count(b'\\"')


def _before_backslashes(body: bytes, start: int, end: int) -> int:
    """Where those right before `end` begin."""
    while end > start:
        last = body[max(start, end - SEARCH_BYTES) : end]
        num_kept = len(last.rstrip(b"\\"))
        end -= len(last) - num_kept
        if num_kept:
            break
    return end


def _text_of(body: bytes, start: int, end: int) -> str:
    """What a stretch of a text says. It is cut where no escape and no character can be open."""
    pieces, pace = [], Pace()
    try:
        while start < end:
            until = _next_cut(body, start, end) if end - start > PIECE_BYTES else end
            pieces.append(orjson.loads(b'"%s"' % body[start:until]))
            start = until
            pace.rest()
    except orjson.JSONDecodeError as error:
        raise RequestError("body", f"is not JSON: {error.msg}") from None
    return _joined(pieces)


def _next_cut(body: bytes, start: int, end: int) -> int:
    at = start + PIECE_BYTES
    found = NO_OPEN_ESCAPE.search(body, at, min(at + SEARCH_BYTES, end))
    if found is None and at + SEARCH_BYTES >= end:
        return end
    if found is None:  # backslashes alone, of which two make an escape
        return at - (at - _before_backslashes(body, start, at)) % 2
    cut = found.end()
    for _ in range(3):  # a character has three such bytes at most; more of them are refused wherever they are cut
        if cut < end and body[cut] & 0xC0 == 0x80:
            cut += 1
    return cut


def _joined(pieces: list[str]) -> str:
    num_characters = sum(map(len, pieces))
    if num_characters > MAX_WIDE_CHARACTERS and not all(map(str.isascii, pieces)):
        raise RequestError(
            "body",
            f"has a text of {num_characters} characters that are not all ASCII, more than {MAX_WIDE_CHARACTERS}; "
            "shorten it (a picture in base64 may be longer)",
        )
    # The text grows in place: one `join` would hold the GIL for the page faults of it all, 20 ms for 30 MB.
    text, held, num_held, pace = "", [], 0, Pace()
    for piece in pieces:
        held.append(piece)
        num_held += len(piece)
        if num_held >= GROWTH_CHARACTERS:
            text += "".join(held)
            held, num_held = [], 0
            pace.rest()
    text += "".join(held)
    return text


def _put_back(value: Any, nonce: str, texts: list[str]) -> object:
    """The value with the texts in place of their marks, in keys too."""

    def whole(text: str) -> str:
        first, *others = text.split(f"{nonce}-")
        if len(others) == 1 and not first and text.endswith(";") and text.count(";") == 1:
            return texts[int(others[0][:-1])]
        pieces = [first]
        for other in others:
            number, _, rest = other.partition(";")
            pieces += [texts[int(number)], rest]
        return _joined(pieces) if others else text

    outermost = [value]
    pending: list[Any] = [outermost]
    while pending:
        one = pending.pop()
        if isinstance(one, list) and _are_numbers(one):
            continue
        for key, entry in one.items() if isinstance(one, dict) else enumerate(one):
            if isinstance(entry, str):
                one[key] = whole(entry)
            elif isinstance(entry, (dict, list)):
                pending.append(entry)
        if isinstance(one, dict) and any(nonce in key for key in one):
            renamed = {whole(key): entry for key, entry in one.items()}
            if len(renamed) < len(one):
                raise RequestError("body", "gives a key twice in one object; give each once")
            one.clear()
            one.update(renamed)
    return outermost[0]


# ---------------------------------------------------------------------- keys given twice


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
        elif isinstance(one, list) and not _are_numbers(one):
            pending += one
    return num_colons


def _are_numbers(entries: list[Any]) -> bool:
    if len(entries) <= SLICE_ENTRIES:
        return _NUMBERS.issuperset(map(type, entries))
    return all(_are_numbers(entries[at : at + SLICE_ENTRIES]) for at in range(0, len(entries), SLICE_ENTRIES))


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
