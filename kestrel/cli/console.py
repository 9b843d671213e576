"""Where text goes: results to stdout, everything else to stderr."""

from __future__ import annotations

import sys

from rich.console import Console


def stdout_console() -> Console:
    return Console(file=sys.stdout, highlight=False)


def stderr_console() -> Console:
    return Console(file=sys.stderr, highlight=False)


def write(text: str) -> None:
    """Part of a result, as it is, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def note(text: str) -> None:
    """A remark beside the result."""
    stderr_console().print(text, style="dim", markup=False, soft_wrap=True)
