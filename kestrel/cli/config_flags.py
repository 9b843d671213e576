"""Flags from dataclass fields, so that a flag's name, help and default cannot drift from the field.

A verb takes a dataclass as a parameter; `with_flags` puts a flag for each of its fields in that parameter's place:

- help from `metadata["help"]`, names from `metadata["flags"]` or `--field-name`; no flag when "flags" is empty
- required where the field has no default
- `--x/--no-x` for booleans, unless "flags" says otherwise
- a repeatable flag for a tuple
- help under the title of the last `metadata["group"]`; where fields are marked with `metadata["common"]`, the others
  are shown by --help-all only, as is a parameter with RARE in its annotation
- the environment variables KESTREL_<FLAG> and KESTREL_<FIELD> for every flag of the RuntimeConfig and the ServerConfig
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, Optional, TypeVar, Union, get_args, get_origin, get_type_hints

import typer

from kestrel.cli.verb_help import RARE, HelpAllOption, VerbCommand, VerbGroup, rare_flags, titles
from kestrel.config import RuntimeConfig, environment_names, flag_names
from kestrel.errors import AboutField, KestrelError
from kestrel.integrations.cluster.config import ClusterConfig
from kestrel.server.config import ServerConfig

WITH_ENVIRONMENT = (RuntimeConfig, ServerConfig, ClusterConfig)

GroupT = TypeVar("GroupT")


def with_flags(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb with every parameter of a dataclass type replaced by its flags."""
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
    def with_grouped_values(context: typer.Context, **values: Any) -> None:
        values.pop("help_all", None)
        try:
            grouped = {name: _taken_from(values, group) for name, group in groups.items()}
            verb(**values, **grouped)
        except KestrelError as error:
            name_givers(error, groups.values(), context)
            raise

    parameters.insert(0, inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))
    rare = [name for name, hint in hints.items() if RARE in getattr(hint, "__metadata__", ())]
    rare += [name for group in groups.values() for name in rare_flags(group)]
    if rare:
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter("help_all", kind, default=False, annotation=HelpAllOption))
    # Typer reads both: the order from the signature, the types from the annotations.
    with_grouped_values.__dict__["__signature__"] = inspect.Signature(parameters)
    with_grouped_values.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    with_grouped_values.__dict__["rare_flags"] = rare
    return with_grouped_values


def name_givers(error: KestrelError, groups: Iterable[type], context: typer.Context) -> None:
    """Lets a refusal name settings by what gave them: a flag, an environment variable, or a key of the YAML file."""
    known = {field.name: field for group in groups for field in fields(group) if flag_names(field)}
    text, head = str(error), error.field if isinstance(error, AboutField) else ""
    if head in known:
        text = text.removeprefix(f"{head}: ")
    # Other settings, where a word can be nothing else: fields of one word are words of the language too.
    others = re.compile(rf"(?<![\w/.-])({'|'.join(name for name in known if '_' in name)})(?![\w/-]|\.\w)")
    text = others.sub(lambda found: _giver(known[found[1]], context, with_field=False), text)
    if head in known:
        text = f"{_giver(known[head], context, with_field=True)}: {text}"
    elif text.startswith(f"{head}:"):
        text = f"{_own_name(head, context)}{text.removeprefix(head)}"
    error.args = (text,)


def _own_name(head: str, context: typer.Context) -> str:
    """Of a verb's own parameter: its flag, or the word that its usage has for it where it was given without one."""
    params = context.command.params
    flag = next((one for one in params if one.name == head and one.param_type_name == "option"), None)
    source = None if flag is None else context.get_parameter_source(head)
    words = [re.findall(r"\w+", one.metavar or "") for one in params if one.param_type_name == "argument"]
    if (source is None or source.name == "DEFAULT") and any(head.upper() in each for each in words):
        return head.upper()
    return head if flag is None else _as_typed(flag.opts, context)


def _giver(field: Field[Any], context: typer.Context, *, with_field: bool) -> str:
    source = context.get_parameter_source(field.name)
    if source is not None and source.name == "DEFAULT_MAP":
        return f"{context.params['config_file']}: {field.name}" if with_field else field.name
    variable = variable_of(context, field.name, environment_names(field))
    if variable is not None:
        return f"{variable} ({field.name})" if with_field else variable
    return _as_typed(flag_names(field), context)


def variable_of(context: typer.Context, parameter: str, variables: Iterable[str]) -> str | None:
    """The variable that gave a parameter of a command its value; None when something else did."""
    source = context.get_parameter_source(parameter)
    if source is None or source.name != "ENVIRONMENT":
        return None
    return next((variable for variable in variables if os.environ.get(variable)), None)


def _as_typed(names: Sequence[str], context: typer.Context) -> str:
    """The name that the command line has last, else the first."""
    arguments = context.find_object(tuple) or ()
    flags = arguments[: arguments.index("--")] if "--" in arguments else arguments
    typed = [argument.partition("=")[0] for argument in flags]
    return next((name for name in reversed(typed) if name in names), names[0])


def takes_config(verb: Callable[..., None]) -> bool:
    return "kv_cache_pages" in inspect.signature(verb).parameters


def environment_hint(verb: Callable[..., None]) -> str | None:
    """A line for a verb's help; naming the variable at every flag would double its length."""
    if "api_keys" in inspect.signature(verb).parameters:
        return "Every flag has an environment variable: KESTREL_PORT for --port, and so on."
    if takes_config(verb):
        return "Flags of the model and the engine have environment variables: KESTREL_DEVICE for --device, and so on."
    return None


def add_verb(app: typer.Typer, name: str, verb: Callable[..., None]) -> None:
    app.command(name, cls=VerbCommand, epilog=environment_hint(verb))(verb)


def verb_group(text: str) -> typer.Typer:
    """For verbs with verbs of their own; called without one, it shows its help."""

    def show_help(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())

    group = typer.Typer(cls=VerbGroup, help=text, add_completion=False, rich_markup_mode=None)
    group.callback(invoke_without_command=True)(show_help)
    return group


def flag_parameters(group: type) -> list[inspect.Parameter]:
    """One keyword parameter per field that has a flag."""
    hints, groups = get_type_hints(group), titles(group)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_default_of(field),
            annotation=Annotated[
                _value_type(hints[field.name]), _option(field, group in WITH_ENVIRONMENT, groups[field.name])
            ],
        )
        for field in fields(group)
        if flag_names(field)
    ]


def _option(field: Field[Any], reads_environment: bool, title: str | None) -> Any:
    names = flag_names(field)
    if "bool" in str(field.type) and "flags" not in field.metadata:
        names = tuple(f"{name}/--no-{name.removeprefix('--')}" for name in names)
    return typer.Option(
        *names,
        help=field.metadata["help"],
        metavar=field.metadata.get("metavar"),
        hidden=field.metadata.get("hidden", False),
        envvar=_environment(field) if reads_environment else None,
        show_envvar=False,
        rich_help_panel=title,
        show_default=field.metadata.get("show_default", True),
    )


def _environment(field: Field[Any]) -> str | list[str]:
    names = environment_names(field)
    return names[0] if len(names) == 1 else names


def _taken_from(values: dict[str, Any], group: type[GroupT]) -> GroupT:
    """Moves the group's values out of `values` into an object of its type."""
    names = [parameter.name for parameter in flag_parameters(group)]
    taken = {name: values.pop(name) for name in names}
    return group(**{name: tuple(value) if isinstance(value, list) else value for name, value in taken.items()})


def _default_of(field: Field[Any]) -> Any:
    """Nothing for a field that has to be given."""
    if field.default_factory is not MISSING:
        raise TypeError(f"{field.name} needs a plain default to become a flag")
    return inspect.Parameter.empty if field.default is MISSING else field.default


def _value_type(hint: Any) -> Any:
    """What one flag takes: the type itself, or text where a field takes several kinds of value."""
    if hint is Any:
        return str
    if get_origin(hint) is tuple:
        return list[get_args(hint)[0]]
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    kinds = [kind for kind in get_args(hint) if kind is not types.NoneType]
    return Optional[kinds[0] if len(kinds) == 1 else str]  # noqa: UP045 (built at run time)
