"""Where text goes: results to stdout, everything else to stderr."""

from __future__ import annotations

import sys

from rich.console import Console

_CONTROLS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def stdout_console() -> Console:
    return Console(file=sys.stdout, highlight=False)


def stderr_console() -> Console:
    return Console(file=sys.stderr, highlight=False)


def printable(text: str) -> str:
    """Without control characters: neither a model nor a file may steer the terminal."""
    return text.translate(_CONTROLS)


def write(text: str) -> None:
    """Part of a result, at once. A terminal gets no control characters."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def note(text: str) -> None:
    """A remark beside the result."""
    stderr_console().print(text, style="dim", markup=False, soft_wrap=True)
