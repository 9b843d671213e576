"""What a verb shares with the terminal: where text goes, what an error looks like, exit codes, and Ctrl-C.

Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Coroutine
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, cast

import typer

from kestrel.cli.config_flags import variable_of
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

if TYPE_CHECKING:
    import asyncio

    from rich.console import Console

_CONTROLS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def stdout_console() -> Console:
    return _console(sys.stdout)


def stderr_console() -> Console:
    return _console(sys.stderr)


def _console(file: TextIO) -> Console:
    from rich.console import Console  # noqa: PLC0415 - help needs none of it

    return Console(file=file, highlight=False, emoji=False)


def printable(text: str) -> str:
    """Without control characters: neither a model nor a file may steer the terminal."""
    return text.translate(_CONTROLS)


def write(text: str) -> None:
    """Part of a result, immediately. A terminal gets no control characters."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def note(text: str) -> None:
    """A remark beside the result."""
    stderr_console().print(text, style="dim", markup=False, soft_wrap=True)


# ---------------------------------------------------------------------- errors and exit codes


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
        stderr_console().print("".join(traceback.format_exception(error)), markup=False, soft_wrap=True)
    print_error(_message(error))
    if _is_unexpected(error) and not debugging:
        stderr_console().print(f"Set {DEBUG_VARIABLE}=1 for the traceback.", style="dim", highlight=False)
    return exit_code_of(error)


def print_error(message: str) -> None:
    from rich.text import Text  # noqa: PLC0415

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


# ---------------------------------------------------------------------- Ctrl-C


ResultT = TypeVar("ResultT")


class Interrupted(Exception):
    """Ctrl-C ended the work, and everything it had opened is closed."""


class _Interrupts:
    """SIGINT handler: the first one cancels the work, a second one leaves immediately."""

    def __init__(self) -> None:
        self.seen = False
        self._task: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, signal_number: int, frame: FrameType | None) -> None:
        if self.seen:
            os._exit(INTERRUPTED)
        self.seen = True
        if self._loop is not None and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)

    async def guard(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        import asyncio  # noqa: PLC0415

        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        if self.seen:
            work.close()
            raise asyncio.CancelledError
        return await work


def run_to_end(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The result of `work`. Raises Interrupted after Ctrl-C."""
    import asyncio  # noqa: PLC0415 - help and most refusals need none of it

    interrupts = _Interrupts()
    before = signal.signal(signal.SIGINT, interrupts)
    try:
        return asyncio.run(interrupts.guard(work))
    except asyncio.CancelledError:
        raise Interrupted from None
    finally:
        signal.signal(signal.SIGINT, before)
