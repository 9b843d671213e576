"""The one table from errors to exit codes, and the one line a user sees."""

from __future__ import annotations

import os
import traceback
from typing import cast

import typer
from rich.text import Text

from kestrel.cli.console import stderr_console
from kestrel.cli.environment import variable_of
from kestrel.errors import (
    AdapterNotFound,
    AdapterUnusable,
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineStopped,
    KestrelError,
    RequestError,
)

OK = 0
FAILED = 1
MISUSED = 2
BAD_CHECKPOINT = 3
NO_CAPACITY = 4
INTERRUPTED = 130

# Typer's base of all wrong usage. It is not exported, and which package defines it depends on Typer's release.
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]

EXIT_CODES: tuple[tuple[type[Exception], int], ...] = (
    (USAGE_ERROR, MISUSED),
    (ConfigError, MISUSED),
    (RequestError, MISUSED),
    (AdapterNotFound, MISUSED),
    (CheckpointError, BAD_CHECKPOINT),
    (AdapterUnusable, BAD_CHECKPOINT),
    (CapacityError, NO_CAPACITY),
    (KestrelError, FAILED),
    (Exception, FAILED),
)
"""The first entry an error is an instance of counts."""

DEBUG_VARIABLE = "KESTREL_DEBUG"


def exit_code_of(error: Exception) -> int:
    return next(code for kind, code in EXIT_CODES if isinstance(error, kind))


def report(error: Exception) -> int:
    """Say what went wrong in one line on stderr; return the exit code."""
    debugging = os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")
    if debugging:
        stderr_console().print(Text("".join(traceback.format_exception(error))), soft_wrap=True)
    print_error(_message(error))
    if _is_unexpected(error) and not debugging:
        stderr_console().print(f"Set {DEBUG_VARIABLE}=1 for the traceback.", style="dim", highlight=False)
    return exit_code_of(error)


def print_error(message: str) -> None:
    stderr_console().print(Text.assemble(("error:", "bold red"), " ", one_line(message)), soft_wrap=True)


def one_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return "; ".join(lines).replace(":; ", ": ")


def _message(error: Exception) -> str:
    if isinstance(error, USAGE_ERROR):
        usage = cast(typer.BadParameter, error)
        path = "kestrel" if usage.ctx is None else usage.ctx.command_path
        message = f"{_variable(usage)}{usage.format_message()}"
        return f"{message}{'' if message.endswith(('.', '?')) else '.'} See `{path} --help`."
    if isinstance(error, KestrelError):
        return str(error)
    return f"unexpected {type(error).__name__}: {error}"


def _variable(usage: typer.BadParameter) -> str:
    """The environment variable at fault, if one is, with a colon behind it."""
    if not isinstance(usage, typer.BadParameter) or usage.ctx is None or usage.param is None:
        return ""
    known = usage.param.envvar or ()
    names = [known] if isinstance(known, str) else known
    variable = variable_of(cast(typer.Context, usage.ctx), usage.param.name or "", names)
    return "" if variable is None else f"{variable}: "


def _is_unexpected(error: Exception) -> bool:
    """A fault of the program: not one of our errors, or the engine's worker broke."""
    if isinstance(error, EngineStopped):
        return error.__cause__ is not None
    return not isinstance(error, (KestrelError, USAGE_ERROR))
