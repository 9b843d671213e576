"""Path outlines as the segment skill writes them: command letters and integers in a 960-unit box, one per token."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

UNITS = 960
_COMMANDS = frozenset("MmLlHhVvCcSsQqTtAaZz")
_INTEGER = re.compile(r"-?[0-9]{1,9}")


class PathSyntaxError(ValueError):
    """The items do not spell a path."""


@dataclass(frozen=True, slots=True)
class PathCommand:
    letter: str
    pairs: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        """As SVG, scaled so that the box is 1 wide and high."""
        return " ".join([self.letter, *(scaled(value) for pair in self.pairs for value in pair)])


def scaled(value: int) -> str:
    """`value` units as a share of the box, at most three decimals."""
    return f"{value / UNITS:.3f}".rstrip("0").rstrip(".")


class PathReader:
    """Reads items one at a time. A command is complete when the next one begins, or at the end."""

    def __init__(self) -> None:
        self._letter: str | None = None
        self._numbers: list[int] = []
        self._negative = False

    def push(self, item: str) -> PathCommand | None:
        """Take one item; return the command it completes, if any."""
        if item in _COMMANDS:
            completed = self.finish()
            self._letter, self._numbers = item, []
            return completed
        if self._letter is None:
            raise PathSyntaxError(f"the path begins with {item!r} instead of a command")
        if item == "-" and not self._negative:
            self._negative = True
        elif _INTEGER.fullmatch(item):
            self._numbers.append(-int(item) if self._negative else int(item))
            self._negative = False
        else:
            raise PathSyntaxError(f"{item!r} is neither a command nor a number")
        return None

    def finish(self) -> PathCommand | None:
        """The last command. Numbers come in pairs; a lone one is dropped."""
        if self._negative:
            raise PathSyntaxError("a minus sign is not followed by a number")
        if self._letter is None:
            return None
        numbers = self._numbers
        pairs = tuple((numbers[i], numbers[i + 1]) for i in range(0, len(numbers) - 1, 2))
        return PathCommand(self._letter, pairs)


def parse_path(items: Iterable[str]) -> list[PathCommand]:
    reader = PathReader()
    completed = [reader.push(item) for item in items]
    commands = [command for command in (*completed, reader.finish()) if command is not None]
    if not commands:
        raise PathSyntaxError("there is no path at all")
    return commands


def path_text(commands: Iterable[PathCommand]) -> str:
    return " ".join(str(command) for command in commands)
