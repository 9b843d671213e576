"""Long work in Python that leaves other threads their share.

A thread that computes holds the interpreter for milliseconds at a time, and the worker needs it back for every
operation of a step. So such work rests as often and as long as it computes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TypeVar

STRETCH_S = 0.001

T = TypeVar("T")


class Pace:
    """For a thread of its own, never for the event loop: `rest` between small pieces of work."""

    def __init__(self) -> None:
        self._since_s = time.perf_counter()

    def rest(self) -> None:
        worked_s = time.perf_counter() - self._since_s
        if worked_s > STRETCH_S:
            time.sleep(worked_s)
            self._since_s = time.perf_counter()


def listed(entries: Iterable[T]) -> list[T]:
    """The entries, made one by one with rests."""
    pace = Pace()
    made: list[T] = []
    for entry in entries:
        made.append(entry)
        pace.rest()
    return made
