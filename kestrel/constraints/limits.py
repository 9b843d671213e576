"""What a schema or regular expression may cost, judged before it is compiled.

The compiler bounds most of its own work. Three things it does not bound, each measured to stop a process or hold it for
seconds, are refused here: nesting through many references (it overflows its stack), divisors with many remainders, and
repetitions of repetitions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from kestrel.errors import RequestError

MAX_FORMAT_BYTES = 64 * 1024
MAX_DEPTH = 32
MAX_REACH = 1024
"""Nesting times references: how deep a compiler can get that follows each reference once."""
MAX_DIVISOR = 10_000
"""Least common multiple of every multipleOf, in units of its last digit."""
MAX_REPETITIONS = 10_000
"""Product of nested counts of repetition, as in (a{100}){100}."""
MAX_INTEGER_BITS = 256

_COUNT = re.compile(r"\{(\d+)(?:,(\d*))?\}")


def check_schema(name: str, schema: Mapping[str, Any]) -> None:
    """Refuse schemas that are no JSON, too large, or would cost too much to compile."""
    if "x-guidance" in schema:
        raise RequestError(name, "holds x-guidance, which would change how JSON is written; leave it out")
    size = reach = 0
    references: set[str] = set()
    divisor = 1
    for depth, key, value in _walk(name, schema):
        size += _size(name, value)
        reach = max(reach, depth)
        if size > MAX_FORMAT_BYTES:
            raise RequestError(name, f"is larger than {MAX_FORMAT_BYTES} bytes; ask for less at once")
        if key in ("$ref", "$dynamicRef", "$recursiveRef") and isinstance(value, str):
            references.add(value)
        elif key == "multipleOf":
            divisor = _combined(name, divisor, value)
        elif key == "pattern" and isinstance(value, str):
            check_pattern(name, value)
        elif key == "patternProperties" and isinstance(value, Mapping):
            for pattern in value:
                check_pattern(name, str(pattern))
    if reach * (len(references) + 1) > MAX_REACH:
        raise RequestError(name, f"nests {reach} deep with {len(references)} references; use fewer or flatten it")


def check_pattern(name: str, pattern: str) -> None:
    """Refuse expressions whose nested repetitions multiply to too many."""
    if len(pattern) > MAX_FORMAT_BYTES:
        raise RequestError(name, f"is longer than {MAX_FORMAT_BYTES} characters; shorten it")
    if most_repetitions(pattern) > MAX_REPETITIONS:
        raise RequestError(name, f"repeats something more than {MAX_REPETITIONS} times; use smaller counts, * or +")


def most_repetitions(pattern: str) -> int:
    """The largest product of nested counts in an expression; * and + count once."""
    groups = [1]  # the most inside each open group
    last = 1  # of the atom before the cursor
    at = 0
    while at < len(pattern):
        sign = pattern[at]
        count = _COUNT.match(pattern, at) if sign == "{" else None
        if count is not None:
            last *= max(_number(count[1]), _number(count[2] or "1"))
            groups[-1] = max(groups[-1], last)
            at = count.end()
            continue
        if sign == "(":
            groups.append(1)
        elif sign == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] = max(groups[-1], last)
        elif sign not in "*+?":
            last = 1
        at = _after_class(pattern, at) if sign == "[" else at + 1 + (sign == "\\")
    return max(groups)


def _number(digits: str) -> int:
    return int(digits) if len(digits) <= 9 else 10**9


def _after_class(pattern: str, at: int) -> int:
    """Behind the bracket that closes the class opened at `at`; a bracket right at its start is a member."""
    at += 1 + pattern.startswith("^", at + 1)
    at += pattern.startswith("]", at)
    while at < len(pattern) and pattern[at] != "]":
        at += 1 + (pattern[at] == "\\")
    return at + 1


def _walk(name: str, schema: Mapping[str, Any]) -> Iterator[tuple[int, str, Any]]:
    """(depth, key, value) of everything in a schema, without recursion. Raises when it nests too deeply."""
    pending: list[tuple[int, str, Any]] = [(1, "", schema)]
    while pending:
        depth, key, value = pending.pop()
        yield depth, key, value
        is_container = isinstance(value, (Mapping, list, tuple))
        if is_container and depth > MAX_DEPTH:
            raise RequestError(name, f"nests deeper than {MAX_DEPTH} levels; flatten it")
        if isinstance(value, Mapping):
            pending += [(depth + 1, _key(name, inner), item) for inner, item in value.items()]
        elif is_container:
            pending += [(depth + 1, key, item) for item in value]


def _key(name: str, key: Any) -> str:
    if not isinstance(key, str):
        raise RequestError(name, f"holds the key {key!r}; keys of JSON are text")
    return key


def _size(name: str, value: Any) -> int:
    """Roughly the bytes a value takes as JSON, containers without their items."""
    if isinstance(value, str):
        return 3 + len(value)
    if isinstance(value, Mapping):
        return 2 + sum(4 + len(key) for key in value if isinstance(key, str))
    if isinstance(value, (list, tuple)):
        return 2 + 2 * len(value)
    if value is None or isinstance(value, bool):
        return 5
    if isinstance(value, int) and value.bit_length() <= MAX_INTEGER_BITS:
        return 20
    if isinstance(value, float) and math.isfinite(value):
        return 20
    raise RequestError(name, f"holds a {type(value).__name__} that JSON schema has no room for; give plain JSON")


def _combined(name: str, divisor: int, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise RequestError(name, f"holds multipleOf {value!r}; it must be a number above 0")
    _, digits, exponent = Decimal(str(value)).normalize().as_tuple()
    remainders = int("".join(map(str, digits))) * 10 ** max(int(exponent), 0)
    combined = math.lcm(divisor, remainders)
    if combined > MAX_DIVISOR:
        raise RequestError(name, f"holds multipleOf with more than {MAX_DIVISOR} remainders; use rounder divisors")
    return combined
