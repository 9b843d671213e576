"""How much memory Python objects take at most while a piece of work is done."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable


def least_peak_bytes(work: Callable[[], object], tries: int = 3) -> int:
    """The least of some tries: threads that earlier tests left, and first imports, are counted in a try too."""
    return min(_peak_bytes(work) for _ in range(tries))


def _peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
