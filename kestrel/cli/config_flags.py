"""Flags from dataclass fields, so that a flag's name, help and default cannot drift from the field.

A verb takes a dataclass as a parameter; `with_flags` puts a flag for each of its fields in that parameter's place:

- help from `metadata["help"]`, names from `metadata["flags"]` or `--field-name`; no flag when "flags" is empty
- `--x/--no-x` for booleans, unless "flags" says otherwise
- the environment variable KESTREL_<FLAG> where the group has an environment
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Annotated, Any, Optional, TypeVar, Union, get_args, get_origin, get_type_hints

import typer

from kestrel.cli.options import ObjectSettings, OutputOptions, SaveOptions, TextOutputOptions, TextSettings
from kestrel.config import RuntimeConfig

ENVIRONMENT_PREFIX = "KESTREL_"

GroupT = TypeVar("GroupT")


@dataclass(frozen=True)
class FlagGroup:
    """How the flags of one dataclass appear."""

    panel: str
    reads_environment: bool = False


FLAG_GROUPS: dict[type, FlagGroup] = {
    RuntimeConfig: FlagGroup("Model and engine", reads_environment=True),
    TextSettings: FlagGroup("Sampling"),
    ObjectSettings: FlagGroup("Sampling"),
    OutputOptions: FlagGroup("Output"),
    SaveOptions: FlagGroup("Output"),
    TextOutputOptions: FlagGroup("Output"),
}


def with_flags(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb with every parameter of a grouped dataclass type replaced by that dataclass's flags."""
    hints = get_type_hints(verb, include_extras=True)
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(verb).parameters.values():
        hint = hints[parameter.name]
        if is_dataclass(hint) and isinstance(hint, type):
            groups[parameter.name] = hint
            parameters += flag_parameters(hint)
        else:
            keyword_only = parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY)
            parameters.append(keyword_only)

    @functools.wraps(verb)
    def with_grouped_values(**values: Any) -> None:
        grouped = {name: _taken_from(values, group) for name, group in groups.items()}
        verb(**values, **grouped)

    # Typer reads both: the order from the signature, the types from the annotations.
    with_grouped_values.__dict__["__signature__"] = inspect.Signature(parameters)
    with_grouped_values.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_grouped_values


def flag_parameters(group: type) -> list[inspect.Parameter]:
    """One keyword parameter per field that has a flag."""
    hints = get_type_hints(group)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_default_of(field),
            annotation=Annotated[_value_type(hints[field.name]), _option(field, FLAG_GROUPS[group])],
        )
        for field in fields(group)
        if flag_names(field)
    ]


def flag_names(field: Field[Any]) -> tuple[str, ...]:
    """Every spelling of a field's flag; a boolean's opposite is not among them."""
    return tuple(field.metadata.get("flags", (_dashed(field.name),)))


def environment_names(field: Field[Any]) -> list[str]:
    return [ENVIRONMENT_PREFIX + name.removeprefix("--").replace("-", "_").upper() for name in flag_names(field)]


def _option(field: Field[Any], group: FlagGroup) -> Any:
    names = flag_names(field)
    if "bool" in str(field.type) and "flags" not in field.metadata:
        names = tuple(f"{name}/--no-{name.removeprefix('--')}" for name in names)
    return typer.Option(
        *names,
        help=field.metadata["help"],
        metavar=field.metadata.get("metavar"),
        hidden=field.metadata.get("hidden", False),
        envvar=environment_names(field) if group.reads_environment else None,
        show_default=field.metadata.get("show_default", True),
        rich_help_panel=group.panel,
    )


def _taken_from(values: dict[str, Any], group: type[GroupT]) -> GroupT:
    """Moves the group's values out of `values` into an object of its type."""
    names = [parameter.name for parameter in flag_parameters(group)]
    return group(**{name: values.pop(name) for name in names})


def _default_of(field: Field[Any]) -> Any:
    if field.default is MISSING:
        raise TypeError(f"{field.name} needs a plain default to become a flag")
    return field.default


def _value_type(hint: Any) -> Any:
    """What one flag takes: the type itself, or text where a field takes several kinds of value."""
    if hint is Any:
        return str
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    kinds = [kind for kind in get_args(hint) if kind is not types.NoneType]
    return Optional[kinds[0] if len(kinds) == 1 else str]  # noqa: UP045 (built at run time)


def _dashed(name: str) -> str:
    return "--" + name.replace("_", "-")
