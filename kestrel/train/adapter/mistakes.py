"""Mistakes in training data: all of them are looked for before any is told, so that a file is mended once."""

from __future__ import annotations

from kestrel.errors import ConfigError

MAX_SHOWN = 12


class Mistake(ValueError):
    """One mistake in one place; whoever knows the place catches it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")


class DataError(ConfigError):
    """The training data cannot be used as it is."""

    def __init__(self, mistakes: list[str]) -> None:
        shown = mistakes[:MAX_SHOWN]
        if len(mistakes) > len(shown):
            shown.append(f"and {len(mistakes) - len(shown)} more")
        count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        super().__init__("data", "\n".join([f"{count}, nothing was trained:", *shown]))
        self.mistakes = tuple(mistakes)


class MistakeList:
    """Collects mistakes with their places."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def add(self, where: str, mistake: Exception | str) -> None:
        self._found.append(f"{where}: {mistake}")

    def check(self) -> None:
        """Raises when there are any."""
        if self._found:
            raise DataError(self._found)
