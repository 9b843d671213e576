"""Strict reading of config sections from JSON: what is unknown, missing or of a wrong type is a CheckpointError."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, fields, replace
from typing import Any, ClassVar, Protocol, TypeVar

from kestrel.errors import CheckpointError
from kestrel.moondream.sections import GenerationConfig, MoeConfig, TextConfig, TokenizerConfig
from kestrel.skills.base import SkillDefaults, Template

CAPTION_LENGTHS = ("short", "normal", "long")
SKILL_TEMPLATES = ("query", "detect", "point", "segment")
MAY_BE_ZERO = ("start_layer", "overlap_margin", "temperature")


class DataclassType(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


ConfigT = TypeVar("ConfigT", bound=DataclassType)


def json_object(value: object, path: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"model config: {path} must be a JSON object (got {value!r})")
    return dict(value)


def required_key(data: Mapping[str, Any], key: str, path: str) -> Any:
    if key not in data:
        raise CheckpointError(f"model config: {path}.{key} is missing; add it to config.json")
    return data[key]


def refuse_unknown(data: Mapping[str, Any], known: tuple[str, ...], path: str) -> None:
    for key in data:
        if key not in known:
            raise CheckpointError(f"model config: {path}.{key} is unknown; {path} has {', '.join(known)}")


def read_flat(cls: type[ConfigT], raw: object, path: str, **given: Any) -> ConfigT:
    """A config class of plain numbers and flags from a JSON object; `given` fields are already read."""
    data = json_object(raw, path)
    refuse_unknown(data, tuple(f.name for f in fields(cls)), path)
    values = dict(given)
    for f in fields(cls):
        is_required = f.default is MISSING and f.default_factory is MISSING
        if f.name not in given and (is_required or f.name in data):
            value = required_key(data, f.name, path)
            is_absent = value is None and str(f.type).endswith(" | None")
            values[f.name] = None if is_absent else _plain_value(value, str(f.type), f"{path}.{f.name}")
    return cls(**values)


def read_text(raw: object) -> TextConfig:
    data = json_object(raw, "text")
    if "n_heads" in data:
        data.setdefault("n_kv_heads", data["n_heads"])
    moe = data.get("moe")
    return read_flat(TextConfig, data, "text", moe=None if moe is None else read_flat(MoeConfig, moe, "text.moe"))


def read_tokenizer(raw: object) -> TokenizerConfig:
    data = json_object(raw, "tokenizer")
    templates = _read_templates(required_key(data, "templates", "tokenizer"))
    return read_flat(TokenizerConfig, data, "tokenizer", templates=templates)


def _read_templates(raw: object, path: str = "tokenizer.templates") -> dict[str, Template]:
    data = json_object(raw, path)
    refuse_unknown(data, ("caption", *SKILL_TEMPLATES), path)
    given = {name: value for name, value in data.items() if value is not None}
    templates: dict[str, Template] = {}
    captions = json_object(given.pop("caption", {}), f"{path}.caption")
    refuse_unknown(captions, CAPTION_LENGTHS, f"{path}.caption")
    for length, ids in captions.items():
        if ids is not None:
            templates[f"caption.{length}"] = Template(_token_ids(ids, f"{path}.caption.{length}"))
    for skill, value in given.items():
        parts = json_object(value, f"{path}.{skill}")
        refuse_unknown(parts, ("prefix", "suffix"), f"{path}.{skill}")
        prefix = _token_ids(required_key(parts, "prefix", f"{path}.{skill}"), f"{path}.{skill}.prefix")
        suffix = _token_ids(required_key(parts, "suffix", f"{path}.{skill}"), f"{path}.{skill}.suffix")
        templates[skill] = Template(prefix, suffix)
    return templates


def read_generation(raw: object, derived: GenerationConfig) -> GenerationConfig:
    """`derived` with the keys that `raw` gives."""
    data = json_object(raw, "generation")
    refuse_unknown(data, tuple(f.name for f in fields(GenerationConfig)), "generation")
    values: dict[str, Any] = {}
    for name, value in data.items():
        path = f"generation.{name}"
        if name == "defaults":
            merged = asdict(derived.defaults) | json_object(value, path)
            values[name] = read_flat(SkillDefaults, merged, path)
        elif name == "compares_coord_and_eos_only":
            values[name] = _plain_value(value, "bool", path)
        else:
            values[name] = _token_ids(value, path)
    return replace(derived, **values)


def _plain_value(value: Any, annotation: str, path: str) -> Any:
    """`value` if it fits the field's annotation: a flag, or a number that is not negative."""
    kind = annotation.removesuffix(" | None")
    name = path.rpartition(".")[2]
    if kind == "bool":
        valid = isinstance(value, bool)
    else:
        is_number = isinstance(value, int if kind == "int" else (int, float)) and not isinstance(value, bool)
        may_be_zero = name in MAY_BE_ZERO or name.endswith("_id")
        valid = is_number and (value > 0 or (value == 0 and may_be_zero))
    if not valid:
        wanted = {"bool": "true or false", "int": "a positive integer", "float": "a positive number"}[kind]
        raise CheckpointError(f"model config: {path} must be {wanted} (got {value!r})")
    return float(value) if kind == "float" else value


def _token_ids(value: object, path: str) -> tuple[int, ...]:
    if isinstance(value, (list, tuple)) and all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        return tuple(value)
    raise CheckpointError(f"model config: {path} must be a list of token ids (got {value!r})")
