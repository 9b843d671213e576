"""What `response_format` may be, and what is refused before anything is compiled."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kestrel.constraints import ResponseFormat, response_format
from kestrel.constraints.limits import MAX_DEPTH, most_repetitions
from kestrel.errors import RequestError


def of_schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


def read(value: Any) -> ResponseFormat | None:
    return response_format("response_format", value)


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
    assert json.loads(wanted.text) == schema
    assert list(json.loads(wanted.text)["properties"]) == ["b", "a"]  # answers keep the order of the schema
    assert read({"type": "json_object"}) == ResponseFormat("json_schema", '{"type": "object"}')


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
    ],
    ids=lambda schema: str(list(schema))[:40],
)
def test_costly_or_foreign_schemas_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refusal:
        read(of_schema(schema))
    assert refusal.value.field == "response_format.json_schema.schema"
    assert len(str(refusal.value)) < 300


def test_what_is_just_within_the_limits_is_taken() -> None:
    assert read(of_schema(nested(MAX_DEPTH - 1))) is not None
    assert read(of_schema({"multipleOf": 0.01, "allOf": [{"multipleOf": 25}, {"multipleOf": 1e4}]})) is not None
    assert read(of_schema({"pattern": r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}$"})) is not None


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
    assert most_repetitions(pattern) == most
