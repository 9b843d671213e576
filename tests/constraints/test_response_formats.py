"""What `response_format` may be, and what is refused before anything is compiled."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from kestrel.constraints import ResponseFormat, response_format
from kestrel.constraints.cost_limits import MAX_DEPTH, SchemaTree, check_schema
from kestrel.constraints.patterns import matched
from kestrel.errors import RequestError
from tests.constraints.json_walks import compiler, walk


def of_schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


def read(value: Any) -> ResponseFormat | None:
    return response_format("response_format", value)


def judged(schema: dict[str, Any]) -> None:
    """As a request is read, and its format compiled for the first time."""
    read(of_schema(schema))
    check_schema("response_format.json_schema.schema", schema)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def test_text_asks_for_nothing() -> None:
    assert read({"type": "text"}) is None


def test_the_shapes_of_the_openai_api_are_read() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
    wanted = read(of_schema(schema, strict=True, description="what it is"))
    assert wanted is not None
    assert wanted.kind == "json_schema"
    assert json.loads(wanted.text) == {**schema, "additionalProperties": False}
    assert list(json.loads(wanted.text)["properties"]) == ["b", "a"]  # answers keep the order of the schema
    assert read({"type": "json_object"}) == ResponseFormat("json_schema", '{"type": "object"}')


NAMED: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
JOINED = {"allOf": [NAMED, {"properties": {"b": {}}}]}


@pytest.mark.parametrize(
    ("schema", "fits", "does_not"),
    [
        (NAMED, {"a": 1}, {"a": 1, "b": 2}),
        ({"properties": {"in": NAMED}}, {"in": {"a": 1}}, {"in": {"b": 2}}),
        ({"type": "array", "items": NAMED}, [{"a": 1}], [{"b": 1}]),
        ({"type": "object", "additionalProperties": NAMED}, {"x": {"a": 1}}, {"x": {"b": 1}}),
        ({"anyOf": [NAMED, {"type": "null"}]}, {"a": 1}, {"b": 1}),
        ({"$ref": "#/$defs/one", "$defs": {"one": NAMED}}, {"a": 1}, {"b": 1}),
        ({**NAMED, "additionalProperties": {"type": "integer"}}, {"b": 1}, {"b": "x"}),
        ({**NAMED, "additionalProperties": True}, {"b": "x"}, {"a": "x"}),
        (JOINED, {"a": 1, "b": 2}, {"a": "x"}),
        ({**NAMED, "anyOf": [{"properties": {"b": {}}}]}, {"a": 1, "b": 2}, {"a": "x"}),
    ],
)
def test_a_strict_schema_closes_its_objects_at_any_depth(schema: Any, fits: Any, does_not: Any) -> None:
    wanted, free = read(of_schema(schema, strict=True)), read(of_schema(schema))
    assert wanted is not None
    assert free is not None
    validator = Draft202012Validator(json.loads(wanted.text))
    assert validator.is_valid(fits)
    assert not validator.is_valid(does_not)
    assert json.loads(free.text) == schema


def test_choices_become_an_expression_in_which_signs_are_plain_text() -> None:
    assert read({"type": "choice", "choices": ["a.b", "(c)"]}) == ResponseFormat("regex", r"a\.b|\(c\)")


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ("json_object", "response_format"),
        ({}, "response_format.type"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": ["text"]}, "response_format.type"),
        ({"type": "text", "schema": {}}, "response_format.schema"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "schema": {}}, "response_format.schema"),
        (of_schema(None), "response_format.json_schema.schema"),
        (of_schema(True), "response_format.json_schema.schema"),
        (of_schema({}, strict="yes"), "response_format.json_schema.strict"),
        (of_schema({}, version=2), "response_format.json_schema.version"),
        ({"type": "json_schema", "json_schema": {"name": 3, "schema": {}}}, "response_format.json_schema.name"),
        ({"type": "regex", "regex": ""}, "response_format.regex"),
        ({"type": "regex", "regex": 7}, "response_format.regex"),
        ({"type": "choice", "choices": []}, "response_format.choices"),
        ({"type": "choice", "choices": ["a", 2]}, "response_format.choices"),
        ({"type": "choice", "choices": "ab"}, "response_format.choices"),
    ],
)
def test_other_shapes_are_refused_by_field(value: Any, field: str) -> None:
    with pytest.raises(RequestError) as refusal:
        read(value)
    assert refusal.value.field == field


def knot() -> dict[str, Any]:
    schema: dict[str, Any] = {}
    schema["a"] = schema["b"] = schema
    return schema


def doubling(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"anyOf": [schema, schema]}
    return schema


ATTACK = {"allOf": [{"type": "string", "pattern": f".*{chr(97 + i)}.{{{10 + i}}}"} for i in range(24)]}
REFERENCES = {f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(1200)}


@pytest.mark.parametrize(
    "schema",
    [
        nested(MAX_DEPTH),
        nested(100_000),
        knot(),
        doubling(15),
        {"enum": ["x" * 100_000]},
        {"enum": [f"value {i}" for i in range(10_000)]},
        {"$ref": "#/$defs/a0", "$defs": REFERENCES | {"a1200": {"type": "null"}}},
        {"type": "integer", "multipleOf": 999_983},
        {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]},
        {"multipleOf": 123.45678},
        {"multipleOf": 0},
        {"multipleOf": "three"},
        {"pattern": "^(a{200}){200}$"},
        {"properties": {"a": {"patternProperties": {"b{99999}": {}}}}},
        {"minimum": 10**4000},
        {"minimum": float("nan")},
        {"const": {1, 2}},
        {"properties": {7: {}}},
        {"x-guidance": {"whitespace_pattern": "a"}},
        {"patternProperties": {f"^k{i}": {} for i in range(100)}},
        {"pattern": ".?" * 600},
        {"pattern": "(.{0,99}x){0,99}(.{0,99}y){0,99}"},
        ATTACK,
        {"allOf": [{"type": "string", "pattern": f"^.*{c}.{{{20 + i}}}$"} for i, c in enumerate("abcdefgh")]},
        {"properties": {"multipleOf": {"type": "integer", "multipleOf": 999_983}}},
        {"x-parts": {"a": {"multipleOf": 999_983}}, "properties": {"b": {"$ref": "#/x-parts/a"}}},
    ],
    ids=lambda schema: str(list(schema))[:40],
)
def test_costly_or_foreign_schemas_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refusal:
        judged(schema)
    assert refusal.value.field == "response_format.json_schema.schema"
    assert len(str(refusal.value)) < 300


def test_what_is_just_within_the_limits_is_taken() -> None:
    judged(nested(MAX_DEPTH - 1))
    judged({"multipleOf": 0.01, "allOf": [{"multipleOf": 25}, {"multipleOf": 1e4}]})
    judged({"pattern": r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}$"})


@pytest.mark.parametrize(
    ("pattern", "most"),
    [
        ("abc", 1),
        ("a{3}b{4}", 4),
        ("(a{3}b{4}){5}", 20),
        ("((a{2}){3,}){1,4}", 24),
        ("(a{2}|b){3}c", 6),
        (r"\(a{2}\){3}", 3),
        ("[(]{5}a", 5),
        ("[](]{5}(b{2}){2}", 5),
        (r"[^\]{7}]", 1),
        ("(a{2})*{3}", 6),
        ("a{x}{,3}", 1),
        (")))a{2}", 2),
        ("a{99999999999}", 10**9),
    ],
)
def test_nested_counts_of_repetition_multiply(pattern: str, most: int) -> None:
    assert matched(pattern).repeats == most


KEYWORDS = ("multipleOf", "pattern", "patternProperties", "$ref", "allOf", "enum", "x-guidance", "properties", "format")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {name: {"type": "string"} for name in KEYWORDS}},
        {"type": "object", "required": list(KEYWORDS), "additionalProperties": {"type": "integer"}},
        {"$defs": {name: {"type": "string"} for name in KEYWORDS}, "$ref": "#/$defs/multipleOf"},
        {"enum": [{"multipleOf": "three", "pattern": "b{99999}"}]},
        {"const": {"multipleOf": -1}},
        {"type": "string", "default": {"pattern": "b{99999}"}, "examples": [{"multipleOf": 0}]},
    ],
    ids=lambda schema: str(list(schema)),
)
def test_names_and_values_are_no_keywords(schema: dict[str, Any]) -> None:
    judged(schema)
    assert walk(compiler().start(ResponseFormat("json_schema", json.dumps(schema))), 1, most=20) != []


def of_letter(letter: str, count: int = 30) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^.*{letter}.{{{count}}}$"}


def all_of_named(keys: str, *, inner: str) -> dict[str, Any]:
    """Objects that all hold, each with a pattern for its own property."""
    return {"allOf": [{inner: {key: of_letter(key)}} for key in keys]}


THREE, FOUR = ({f"l{c}": {"$anchor": f"at-{c}", **of_letter(c)} for c in letters} for letters in ("abc", "abcd"))


@pytest.mark.parametrize(
    ("schema", "num_met"),
    [
        ({"allOf": [of_letter(c) for c in "abc"]}, 3),
        ({"anyOf": [of_letter(c) for c in "abcdef"]}, 1),
        ({"properties": {c: of_letter(c) for c in "abcdef"}}, 1),
        ({"items": of_letter("a"), "allOf": [{"items": of_letter("b")}]}, 2),
        (all_of_named("abc", inner="properties"), 1),
        ({"allOf": [{"properties": {"k": of_letter(c)}} for c in "abc"]}, 3),
        ({"allOf": [{"additionalProperties": of_letter("a")}, {"properties": {"k": of_letter("b")}}]}, 2),
        ({"properties": {"k": of_letter("a")}, "patternProperties": {"^k": of_letter("b")}}, 2),
        ({"$ref": "#/$defs/la", "allOf": [{"$ref": "#/$defs/lb"}, {"$ref": "#/%24defs/lc"}], "$defs": THREE}, 3),
        ({"$ref": "#at-a", "allOf": [{"$ref": "#at-b"}], "$defs": THREE}, 2),
        ({"allOf": [{"anyOf": [of_letter("a"), of_letter("b")]}, of_letter("c")]}, 2),
        ({**of_letter("a"), "format": "email"}, 2),
        (
            {
                "$defs": {"t": {"properties": {"n": {"allOf": [{"$ref": "#/$defs/t"}, of_letter("a")]}}}},
                "$ref": "#/$defs/t",
            },
            1,
        ),
        ({"properties": {"k": {"$id": "x", "$ref": "#/$defs/y"}}, "$defs": FOUR}, 4),
        ({"properties": {"k": {"$ref": "other.json"}}, "$defs": {"a": of_letter("a")}}, 1),
    ],
)
def test_patterns_that_one_value_has_to_match_are_counted_together(schema: dict[str, Any], num_met: int) -> None:
    assert SchemaTree(schema).most_met().num_patterns == num_met
