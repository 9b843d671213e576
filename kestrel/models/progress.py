"""How long work reports how far it is. Whoever draws a bar passes a callable; nobody here draws anything."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called with what is being done, and the bytes done of the bytes in total; the last call has them equal."""

    def __call__(self, label: str, done_bytes: int, total_bytes: int) -> None: ...


def no_progress(label: str, done_bytes: int, total_bytes: int) -> None:
    """For callers that show nothing."""
