"""Settings in a YAML file, by the names of their fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from kestrel.config import flag_names
from kestrel.errors import ConfigError, did_you_mean, shown

MAX_BYTES = 2**20


def read_config_file(path: Path, groups: Sequence[type], giver: str = "--config") -> dict[str, str | list[str]]:
    """The file's values as texts, as if they stood on the command line. Keys are names of fields of the groups."""
    settings = [field for group in groups for field in fields(group)]
    known = {field.name for field in settings if flag_names(field)}
    texts = {field.name for field in settings if "str" in str(field.type)}
    lists = {field.name for field in settings if "tuple" in str(field.type)}
    values: dict[str, str | list[str]] = {}
    for key, value in _mapping(path, giver).items():
        if key not in known:
            close = did_you_mean(key, known)
            raise ConfigError(f"{path}: {key}", f"is not a setting; known ones: {', '.join(sorted(known))}{close}")
        if value is None:
            continue
        items = value if key in lists and isinstance(value, list) else [value]
        written = [_text(path, key, item, needs_quotes=key in texts) for item in items]
        values[key] = written if key in lists else written[0]
    return values


def _mapping(path: Path, giver: str) -> Mapping[Any, Any]:
    try:
        with path.open("rb") as file:
            written = file.read(MAX_BYTES + 1)
        if len(written) > MAX_BYTES:
            raise ConfigError(giver, f"{path} has more than {MAX_BYTES} bytes; give a smaller file")
        content = yaml.load(written, _EachKeyOnce)
    except OSError as error:
        raise ConfigError(giver, f"cannot read {path} ({error.strerror}); give a readable YAML file") from error
    except yaml.YAMLError as error:
        raise ConfigError(giver, f"{path} is not YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ConfigError(giver, f"{path} must map names to values, such as port: 8080")
    return content


class _EachKeyOnce(yaml.SafeLoader):
    """YAML's plain types only; of a key written twice PyYAML would take the last and say nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: list[Any] = []
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{shown(key)} is given twice", key_node.start_mark)
            seen.append(key)
        return super().construct_mapping(node, deep)


def _text(path: Path, key: str, value: Any, *, needs_quotes: bool) -> str:
    if not isinstance(value, (str, int, float, bool)):
        raise ConfigError(f"{path}: {key}", f"must be a single value (got {shown(value)})")
    if needs_quotes and not isinstance(value, str):
        raise ConfigError(f"{path}: {key}", f"is read as {shown(value)}, not as text; put it in quotes")
    return str(value)
