"""What a schema or regular expression may be and may cost, judged before it is compiled.

Size and nesting are judged when a request is read; the rest once for each format, off the event loop. The compiler
bounds most of its own work by counts. What it does not bound, each found to stop a process or hold it for seconds, is
refused here: nesting through many references (it overflows its stack), divisors with many remainders, repetitions of
repetitions, and intersections of intricate expressions, of which a single step can cost gigabytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import unquote

from kestrel.constraints.patterns import Extent, matched, searched
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
_SCALARS = frozenset({str, int, float, bool, type(None)})


def check_shape(name: str, schema: Mapping[str, Any]) -> int:
    """Refuse schemas that are no JSON, nest too deeply, or are too large to be looked at any further. Returns roughly
    the bytes that it takes as JSON."""
    if "x-guidance" in schema:
        raise RequestError(name, "holds x-guidance, which would change how JSON is written; leave it out")
    size = 0
    for _, value in _walk(name, schema):
        size += _size(name, value)
        if size > MAX_FORMAT_BYTES:
            raise RequestError(name, f"is larger than {MAX_FORMAT_BYTES} bytes; make it shorter")
    return size


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
            name,
            f"{where} to match {met.num_patterns} complex patterns at the same time; write one pattern instead of them",
        )


def _require_separable(name: str, patterns: Mapping[str, Extent]) -> None:
    """Names of properties must be told apart: each pattern is intersected with each."""
    if len(patterns) > MAX_NAME_PATTERNS:
        raise RequestError(
            name, f"holds {len(patterns)} patterns in patternProperties; give at most {MAX_NAME_PATTERNS}"
        )
    widest = sorted(extent.at_once for extent in patterns.values())[-2:]
    if len(widest) > 1 and math.prod(widest) > MAX_PLACES_MET:
        raise RequestError(name, "holds complex patterns in patternProperties; use smaller counts of repetition")


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
        if type(value) in _SCALARS:
            continue
        if isinstance(value, (list, tuple)):
            items = value
        elif isinstance(value, (dict, Mapping)):  # the first is looked at first, and faster
            _require_text_keys(name, value)
            items = value.values()
        else:
            continue
        if depth > MAX_DEPTH:
            raise RequestError(name, f"nests deeper than {MAX_DEPTH} levels; flatten it")
        pending += [(depth + 1, item) for item in items]


def _require_text_keys(name: str, value: Mapping[Any, Any]) -> None:
    for key in value:
        if not isinstance(key, str):
            raise RequestError(name, f"holds the key {shown(key)}; keys of JSON are text")


def _size(name: str, value: Any) -> int:
    """Roughly the bytes a value takes as JSON, containers without their items. Empty ones count as more: they take as
    long to look at as others."""
    if isinstance(value, str):
        return 3 + len(value)
    if isinstance(value, (list, tuple)):
        return 8 + 2 * len(value)
    if value is None or isinstance(value, bool):
        return 5
    if isinstance(value, (dict, Mapping)):
        return 8 + sum(4 + len(key) for key in value if isinstance(key, str))
    if isinstance(value, int) and value.bit_length() <= MAX_INTEGER_BITS:
        return 20
    if isinstance(value, float) and math.isfinite(value):
        return 20
    raise RequestError(name, f"holds a {type(value).__name__} that JSON cannot represent; give plain JSON")


def _combined(name: str, divisor: int, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise RequestError(name, f"holds multipleOf {shown(value)}; it must be a number above 0")
    _, digits, exponent = Decimal(str(value)).normalize().as_tuple()
    remainders = int("".join(map(str, digits))) * 10 ** max(int(exponent), 0)
    combined = math.lcm(divisor, remainders)
    if combined > MAX_DIVISOR:
        raise RequestError(name, f"holds multipleOf with more than {MAX_DIVISOR} remainders; use rounder divisors")
    return combined


# ---------------------------------------------------------------------- the schemas inside a schema

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
"""Keywords that map names to schemas: their keys are names, whatever they spell."""
_ALTERNATIVES = ("anyOf", "oneOf")
_INNER = ("items", "prefixItems", "additionalItems", "additionalProperties", "contains", "propertyNames", "not")
_INNER += ("if", "then", "else", "unevaluatedItems", "unevaluatedProperties", "contentSchema")
"""Keywords whose value is a schema, or a list of schemas, for something else than the value itself."""
_FORMAT_PLACES = 50.0
"""Of the compiler's own expressions for `format`."""

Schema: TypeAlias = Mapping[str, Any]


class Met(NamedTuple):
    """Patterns that meet at one value."""

    at_once: float = 1.0
    """The product of the places a matcher can stand at in each."""
    num_patterns: int = 0
    name: str = ""

    def beside(self, other: Met) -> Met:
        return Met(self.at_once * other.at_once, self.num_patterns + other.num_patterns)


MetByName: TypeAlias = dict[str, Met]
"""At the value itself, and at values inside it by the property they are; those without a name are UNNAMED."""
ITSELF, UNNAMED = "", "*"
_NONE = Met()


class SchemaTree:
    """Everything in a schema that is read as one, and what its references name."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._anchors: dict[str, Any] = {}
        self._starts_anew = False
        self.schemas = list(self._reached())
        """Values of enum, default and the like are none, unless something refers to them."""
        self.references = {reference for schema in self.schemas for reference in _references(schema)}
        patterns = (schema.get("pattern") for schema in self.schemas)
        self.patterns: dict[str, Extent] = {one: searched(one) for one in patterns if isinstance(one, str)}
        self.name_patterns: dict[str, Extent] = {
            one: searched(one)
            for schema in self.schemas
            if isinstance(by_name := schema.get("patternProperties"), Mapping)
            for one in by_name
        }

    def _reached(self) -> Iterator[Schema]:
        seen: set[int] = set()
        pending: list[Any] = [self._root]
        while pending:
            schema = pending.pop()
            if not isinstance(schema, Mapping) or id(schema) in seen:
                continue
            seen.add(id(schema))
            yield schema
            for key in ("$anchor", "$dynamicAnchor"):
                if isinstance(anchor := schema.get(key), str):
                    self._anchors[anchor] = schema
            if schema is not self._root and isinstance(schema.get("$id"), str):
                self._starts_anew = True  # references below it are relative to it
            pending += _inside(schema)
            pending += [self.named(reference) for reference in _references(schema)]

    def named(self, reference: str) -> Any:
        """What a reference names within the schema; None when it is not found there."""
        beginning, *steps = unquote(reference).split("/")
        if beginning != "#":
            return self._anchors.get(beginning[1:]) if beginning.startswith("#") and not steps else None
        here: Any = self._root
        for step in (one.replace("~1", "/").replace("~0", "~") for one in steps):
            if isinstance(here, Mapping):
                here = here.get(step)
            elif isinstance(here, (list, tuple)) and step.isdecimal() and int(step) < len(here):
                here = here[int(step)]
            else:
                return None
        return here

    # ------------------------------------------------------------------ which patterns meet

    def most_met(self) -> Met:
        """Where the most places meet. Where it is not certain what a reference names, all patterns may meet."""
        if self._starts_anew or any(not isinstance(self.named(one), (Mapping, bool)) for one in self.references):
            return _all_of([self._own(schema) for schema in self.schemas])
        known: dict[str, MetByName] = {}
        for reference in self._inner_first() * 2:  # what refers to itself knows nothing of itself at first
            known[reference] = self._met(self.named(reference), known)
        found = _joined([self._met(self._root, known), *known.values()])
        return max((met._replace(name=name) for name, met in found.items()), default=_NONE)

    def _inner_first(self) -> list[str]:
        """References, each behind those that what it names refers to."""
        order: dict[str, None] = {}
        for reference in self.references:
            pending, seen = [(reference, False)], set[str]()
            while pending:
                one, is_done = pending.pop()
                if is_done:
                    order[one] = None
                elif one not in order and one not in seen:
                    seen.add(one)
                    pending.append((one, True))
                    pending += [(other, False) for other in _references_below(self.named(one))]
        return list(order)

    def _met(self, schema: Any, known: Mapping[str, MetByName]) -> MetByName:
        if not isinstance(schema, Mapping):
            return {}

        def each(value: Any) -> list[MetByName]:
            return [self._met(one, known) for one in _listed(value)]

        def by_name(key: str, name: str | None = None) -> list[MetByName]:
            inner = schema.get(key)
            pairs = inner.items() if isinstance(inner, Mapping) else ()
            return [_under(name or own_name, self._met(one, known)) for own_name, one in pairs]

        inside = [_under(UNNAMED, one) for key in _INNER for one in each(schema.get(key))]
        return _meeting(
            [
                {ITSELF: own} if (own := self._own(schema)).num_patterns else {},
                _joined([*by_name("properties"), *inside]),
                _joined(by_name("patternProperties", UNNAMED)),
                *each(schema.get("allOf")),
                *(_joined(each(schema.get(key))) for key in _ALTERNATIVES),
                *(known.get(reference, {}) for reference in _references(schema)),
            ]
        )

    def _own(self, schema: Schema) -> Met:
        pattern = schema.get("pattern")
        own = Met(self.patterns[pattern].at_once, 1) if isinstance(pattern, str) else _NONE
        return own.beside(Met(_FORMAT_PLACES, 1)) if isinstance(schema.get("format"), str) else own


def _references(schema: Schema) -> list[str]:
    return [value for key in _REFERENCES if isinstance(value := schema.get(key), str)]


def _references_below(schema: Any) -> Iterator[str]:
    pending = [schema]
    while pending:
        one = pending.pop()
        if isinstance(one, Mapping):
            yield from _references(one)
            pending += _inside(one)


def _inside(schema: Schema) -> list[Any]:
    found: list[Any] = []
    for key in _BY_NAME:
        if isinstance(by_name := schema.get(key), Mapping):
            found += by_name.values()
    for key in (*_INNER, *_ALTERNATIVES, "allOf"):
        found += _listed(schema.get(key))
    return found


def _listed(value: Any) -> Iterable[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)


def _under(name: str, met: MetByName) -> MetByName:
    """Of a value inside another one."""
    return _joined([{name: met[ITSELF]}, {n: one for n, one in met.items() if n != ITSELF}]) if ITSELF in met else met


def _joined(alternatives: Iterable[MetByName]) -> MetByName:
    """Where a value has to match one of several: the worst of them."""
    found: MetByName = {}
    for one in alternatives:
        for name, met in one.items():
            found[name] = max(met, found.get(name, _NONE))
    return found


def _meeting(parts: Iterable[MetByName]) -> MetByName:
    """Where a value has to match all of them. A value with a name may also meet what holds for unnamed ones."""
    given = [part for part in parts if part]
    if len(given) < 2:
        return given[0] if given else {}
    names = {name for part in given for name in part}
    return {name: _all_of([_holding_for(name, part) for part in given]) for name in names}


def _holding_for(name: str, part: MetByName) -> Met:
    met = part.get(name, _NONE)
    return met if name == ITSELF else max(met, part.get(UNNAMED, _NONE))


def _all_of(meeting: Iterable[Met]) -> Met:
    total = _NONE
    for one in meeting:
        total = total.beside(one)
    return total
