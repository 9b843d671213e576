"""What a schema or regular expression may be and may cost, judged before it is compiled.

Size and nesting are judged when a request is read; the rest once for each format, off the event loop. The compiler
bounds most of its own work by counts. What it does not bound, each found to stop a process or hold it for seconds, is
refused here: nesting through many references (it overflows its stack), divisors with many remainders, repetitions of
repetitions, and intersections of intricate expressions, of which a single step can cost gigabytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from kestrel.constraints.patterns import Extent, matched
from kestrel.constraints.schemas import SchemaTree
from kestrel.errors import RequestError, shown

MAX_FORMAT_BYTES = 64 * 1024
MAX_DEPTH = 32
MAX_REACH = 1024
"""Nesting times references: how deep a compiler can get that follows each reference once."""
MAX_DIVISOR = 10_000
"""Least common multiple of every multipleOf, in units of its last digit."""
MAX_REPETITIONS = 10_000
"""Product of nested counts of repetition, as in (a{100}){100}."""
MAX_WRITTEN_REPETITIONS = 500
"""Of one expression; a step through a row of them takes the square of their number."""
MAX_PLACES = 10_000
"""Places of one expression that a matcher can stand at together."""
MAX_PLACES_MET = 100_000
"""The product of those numbers over the expressions that one value has to match."""
MAX_NAME_PATTERNS = 64
"""Expressions for names of properties; the compiler compares each with each."""
MAX_INTEGER_BITS = 256


def check_shape(name: str, schema: Mapping[str, Any]) -> None:
    """Refuse schemas that are no JSON, nest too deeply, or are too large to be looked at any further."""
    if "x-guidance" in schema:
        raise RequestError(name, "holds x-guidance, which would change how JSON is written; leave it out")
    size = 0
    for _, value in _walk(name, schema):
        size += _size(name, value)
        if size > MAX_FORMAT_BYTES:
            raise RequestError(name, f"is larger than {MAX_FORMAT_BYTES} bytes; ask for less at once")


def check_schema(name: str, schema: Mapping[str, Any]) -> None:
    """Refuse schemas that would cost too much to compile or to follow. The shape has been checked."""
    tree = SchemaTree(schema)
    divisor = 1
    for keywords in tree.schemas:
        if "multipleOf" in keywords:
            divisor = _combined(name, divisor, keywords["multipleOf"])
    for pattern, extent in (tree.patterns | tree.name_patterns).items():
        _require_simple(name, pattern, extent)
    reach, number = max(depth for depth, _ in _walk(name, schema)), len(tree.references)
    if reach * (number + 1) > MAX_REACH:
        raise RequestError(name, f"nests {reach} deep with {number} references; use fewer or flatten it")
    _require_separable(name, tree.name_patterns)
    met = tree.most_met()
    if met.num_patterns > 1 and met.at_once > MAX_PLACES_MET:
        where = f"the values of {shown(met.name)} have" if met.name.strip("*") else "one value has"
        raise RequestError(
            name, f"{where} to match {met.num_patterns} intricate patterns at once; write one pattern instead of them"
        )


def _require_separable(name: str, patterns: Mapping[str, Extent]) -> None:
    """Names of properties must be told apart: each pattern is intersected with each."""
    if len(patterns) > MAX_NAME_PATTERNS:
        raise RequestError(
            name, f"holds {len(patterns)} patterns in patternProperties; give at most {MAX_NAME_PATTERNS}"
        )
    widest = sorted(extent.at_once for extent in patterns.values())[-2:]
    if len(widest) > 1 and math.prod(widest) > MAX_PLACES_MET:
        raise RequestError(name, "holds intricate patterns in patternProperties; use smaller counts of repetition")


def check_pattern(name: str, pattern: str) -> None:
    """Refuse expressions that would cost too much."""
    _require_simple(name, pattern, matched(pattern))


def _require_simple(name: str, pattern: str, extent: Extent) -> None:
    if extent.repeats > MAX_REPETITIONS:
        raise RequestError(
            name,
            f"repeats something more than {MAX_REPETITIONS} times in {shown(pattern)}; use smaller counts, * or +",
        )
    if extent.num_written > MAX_WRITTEN_REPETITIONS:
        raise RequestError(
            name, f"holds more than {MAX_WRITTEN_REPETITIONS} repetitions in {shown(pattern)}; use fewer"
        )
    if extent.at_once > MAX_PLACES:
        raise RequestError(
            name, f"holds too many repetitions that can overlap in {shown(pattern)}; use fewer or smaller counts"
        )


def _walk(name: str, schema: Mapping[str, Any]) -> Iterator[tuple[int, Any]]:
    """(depth, value) of everything in a schema, without recursion. Raises when it nests too deeply."""
    pending: list[tuple[int, Any]] = [(1, schema)]
    while pending:
        depth, value = pending.pop()
        yield depth, value
        is_container = isinstance(value, (Mapping, list, tuple))
        if is_container and depth > MAX_DEPTH:
            raise RequestError(name, f"nests deeper than {MAX_DEPTH} levels; flatten it")
        if isinstance(value, Mapping):
            _require_text_keys(name, value)
            pending += [(depth + 1, item) for item in value.values()]
        elif is_container:
            pending += [(depth + 1, item) for item in value]


def _require_text_keys(name: str, value: Mapping[Any, Any]) -> None:
    for key in value:
        if not isinstance(key, str):
            raise RequestError(name, f"holds the key {shown(key)}; keys of JSON are text")


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
        raise RequestError(name, f"holds multipleOf {shown(value)}; it must be a number above 0")
    _, digits, exponent = Decimal(str(value)).normalize().as_tuple()
    remainders = int("".join(map(str, digits))) * 10 ** max(int(exponent), 0)
    combined = math.lcm(divisor, remainders)
    if combined > MAX_DIVISOR:
        raise RequestError(name, f"holds multipleOf with more than {MAX_DIVISOR} remainders; use rounder divisors")
    return combined
