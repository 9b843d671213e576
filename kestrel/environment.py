"""Configuration from environment variables: KESTREL_ and the flag in capitals, as the command line names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any

from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError, shown

PREFIX = "KESTREL_"
TRUTHS = {
    **dict.fromkeys(("1", "true", "t", "yes", "y", "on"), True),
    **dict.fromkeys(("0", "false", "f", "no", "n", "off"), False),
}
"""How truth values are written, in any case; the command line takes the same words."""


def flag_names(field: Field[Any]) -> tuple[str, ...]:
    """Every spelling of a field's flag; a boolean's opposite is not among them."""
    return tuple(field.metadata.get("flags", ("--" + field.name.replace("_", "-"),)))


def environment_names(field: Field[Any]) -> list[str]:
    return [PREFIX + name.removeprefix("--").replace("-", "_").upper() for name in flag_names(field)]


def runtime_config_from(environment: Mapping[str, str]) -> RuntimeConfig:
    """The configuration that the variables describe. One that is empty counts as not set."""
    given = {
        field.name: _value(field, name, environment[name])
        for field in fields(RuntimeConfig)
        for name in reversed(environment_names(field))
        if environment.get(name)
    }
    return RuntimeConfig(**given)


def _value(field: Field[Any], name: str, text: str) -> Any:
    kind = str(field.type).removesuffix(" | None")
    try:
        if kind in ("int", "float"):
            return int(text) if kind == "int" else float(text)
        return TRUTHS[text.lower()] if kind == "bool" else text
    except (ValueError, KeyError):
        wanted = {"int": "a whole number", "float": "a number", "bool": "true or false"}[kind]
        raise ConfigError(name, f"must be {wanted} (got {shown(text)})") from None
