"""The schemas inside a schema: where keywords live, what references name, and which patterns one value has to match."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import unquote

from kestrel.constraints.patterns import Extent, searched

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
