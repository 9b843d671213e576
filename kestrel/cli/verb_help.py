"""Verbs and groups of them as commands: how texts become values, and none is given twice; help shows the flags that
people use by group, --help-all every one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperCommand, TyperGroup

from kestrel.config import TRUTHS, flag_names
from kestrel.errors import ConfigError

HELP_ALL = "--help-all"
RARE = object()
"""In the annotation of a verb's own parameter: --help-all shows it, --help does not."""


READERS = {
    int: (int, "a whole number"),
    float: (float, "a number"),
    bool: (lambda text: TRUTHS[text.strip().lower()], "true or false"),
    Path: (Path, "a path"),
    str: (str, "a text"),
}


class _Values:
    """From texts to values of a parameter, in place of Typer's own way, for which it imports pydantic: a tenth of a
    second, in every command."""

    def __init__(self, kind: Any) -> None:
        self._read, self._wanted = READERS[(*get_args(kind), kind)[0]]

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        if param.multiple or param.nargs == -1:
            return [self._one(one, param, ctx) for one in value or ()]
        return self._one(value, param, ctx)

    def _one(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            return self._read(value) if isinstance(value, str) else value
        except (ValueError, KeyError):
            raise typer.BadParameter(f"{value!r} is not {self._wanted}", ctx=ctx, param=param) from None


class _PlainParams:
    """Of a command: older releases of Typer convert without pydantic, and have no such descriptor."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)  # pyright: ignore[reportAttributeAccessIssue]
        for param in params:
            if hasattr(param, "type_descriptor"):
                param.get_runtime_param = lambda kind=param.type_descriptor.annotation: _Values(kind)
        return params


class VerbGroup(_PlainParams, TyperGroup):
    """The program, or a verb with verbs of its own."""


class VerbCommand(_PlainParams, TyperCommand):
    """A verb. Its function names the flags that wait for --help-all as `rare_flags`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Of a flag that takes one value and is given twice, the last one would win unsaid."""
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        for param in given:
            takes_one = param.param_type_name == "option" and not (param.multiple or getattr(param, "is_flag", False))
            if takes_one and given.count(param) > 1:
                raise ConfigError("/".join(param.opts), f"is given {given.count(param)} times; give it once")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        left_out = () if _shows_all(ctx) else self._rare_flags()
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = None if param.name in left_out else param.get_help_record(ctx)
            if record is not None:
                plain = "Arguments" if param.param_type_name == "argument" else "Options"
                groups.setdefault(getattr(param, "rich_help_panel", None) or plain, []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        super().format_epilog(ctx, formatter)
        if self._rare_flags() and not _shows_all(ctx):
            formatter.write_paragraph()
            formatter.write_text(f"{len(self._rare_flags())} more flags: {ctx.command_path} {HELP_ALL}")

    def _rare_flags(self) -> Collection[str]:
        return getattr(self.callback, "rare_flags", ())


def _shows_all(context: Any) -> bool:
    return context.meta.get(HELP_ALL, False)


def _show_all(context: typer.Context, wanted: bool) -> None:
    if wanted:
        context.meta[HELP_ALL] = True
        typer.echo(context.get_help())
        raise typer.Exit


HelpAllOption = Annotated[
    bool, typer.Option(HELP_ALL, help="Show every flag and exit.", is_eager=True, callback=_show_all)
]


def rare_flags(group: type) -> list[str]:
    """Of a dataclass in which some fields are marked as common: the others. All, where it says `is_rare`."""
    flags = [field for field in fields(group) if flag_names(field) and not field.metadata.get("hidden", False)]
    rare = [field.name for field in flags if not field.metadata.get("common", False)]
    return rare if len(rare) < len(flags) or getattr(group, "is_rare", False) else []


def titles(group: type) -> dict[str, str | None]:
    """The title over each field: that of the last field up to it which names one."""
    found: dict[str, str | None] = {}
    title: str | None = None
    for field in fields(group):
        title = found[field.name] = field.metadata.get("group", title)
    return found
