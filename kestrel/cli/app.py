"""The program `kestrel`: how it begins, and how it ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer
from typer.core import TyperGroup

from kestrel.cli.console import note, write
from kestrel.cli.event_loop import Interrupted
from kestrel.cli.exit_codes import FAILED, INTERRUPTED, OK, report
from kestrel.cli.verbs import late_verbs


def run(arguments: Sequence[str]) -> int:
    """Run one command line; return the exit code."""
    try:
        code = _program().main(list(arguments), prog_name="kestrel", standalone_mode=False, obj=tuple(arguments))
        sys.stdout.flush()
        return code or OK
    except BrokenPipeError:
        _drop_stdout()
        return FAILED
    except (Interrupted, KeyboardInterrupt, typer.Abort):
        note("interrupted")
        return INTERRUPTED
    except Exception as error:
        return report(error)


@cache
def _program() -> TyperGroup:
    program = typer.main.get_command(make_app())
    assert isinstance(program, TyperGroup)
    for verb in late_verbs():
        program.add_command(verb)
    return program


def make_app() -> typer.Typer:
    app = typer.Typer(
        help="Kestrel runs vision-language models: answers, captions, points, boxes and outlines.",
        epilog="Start with `kestrel demo`, then `kestrel models`.",
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_kestrel)
    return app


def _kestrel(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, show_default=False)
    ] = False,
) -> None:
    if show_version:
        write(f"kestrel {_version()}\n")
        raise typer.Exit
    if context.invoked_subcommand is None:
        write(context.get_help() + "\n")
        raise typer.Exit


def _version() -> str:
    try:
        return version("kestrel")
    except PackageNotFoundError:
        return "(not installed: run from its source folder)"


def _drop_stdout() -> None:
    """Whoever read stdout has gone; keep the interpreter from complaining about it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
