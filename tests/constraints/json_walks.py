"""Random answers that keep to a constraint, and schemas whose every answer is short enough to end."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from kestrel.constraints.compiler import ConstraintCompiler
from kestrel.models.tokenizer import TextTokenizer
from kestrel.request import TokenConstraint

GOLDENS = Path(__file__).parents[1] / "goldens"
EOS = 0

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 18, "maximum": 120},
        "nickname": {"type": ["string", "null"], "maxLength": 4},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "choice": {"enum": ["red", "naïve", "日本語", 3, None, {"a": [1]}]},
    "bounded integers": {
        "type": "array",
        "items": {"type": "integer", "exclusiveMinimum": -7, "maximum": 1234},
        "minItems": 2,
        "maxItems": 4,
    },
    "person": _PERSON,
    "nested": {
        "type": "object",
        "properties": {
            "who": {"$ref": "#/$defs/person"},
            "friends": {"type": "array", "items": _PERSON, "maxItems": 1},
        },
        "required": ["who"],
        "additionalProperties": False,
        "$defs": {"person": _PERSON},
    },
    "optional fields": {
        "type": "object",
        "properties": {key: {"type": "boolean"} for key in "abcdef"},
        "additionalProperties": False,
    },
    "unicode text": {"type": "string", "minLength": 3, "maxLength": 9},
    "pattern": {"type": "string", "pattern": "^(é|ß){2,5}-[0-9]{3}$"},
    "either": {
        "anyOf": [
            {"type": "boolean"},
            {"const": "état"},
            {"type": "array", "prefixItems": [{"const": 1}], "items": False},
        ]
    },
    "number": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
}


def tokenizer(model: str = "md3") -> TextTokenizer:
    return TextTokenizer.from_file(GOLDENS / model / "tokenizer.json")


def compiler(**options: Any) -> ConstraintCompiler:
    """Without trials, which take a process."""
    return ConstraintCompiler(tokenizer().to_json, EOS, **{"are_tried": False, **options})


def allowed_ids(constraint: TokenConstraint) -> list[int]:
    mask = constraint.allowed
    return [8 * at + bit for at, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1]


def walk(constraint: TokenConstraint, seed: int, most: int = 400) -> list[int] | None:
    """Ids of a random answer, or None when it did not end."""
    choose = random.Random(seed)
    ids: list[int] = []
    for _ in range(most):
        token_id = choose.choice(allowed_ids(constraint))
        if token_id == EOS:
            return ids
        constraint.accept(token_id)
        ids.append(token_id)
    return None


def assert_valid(text: str, schema: dict[str, Any]) -> None:
    Draft202012Validator(schema).validate(json.loads(text))
