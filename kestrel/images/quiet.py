"""Keeps Pillow's warnings about odd files from reaching the caller, without touching warnings of other code."""

from __future__ import annotations

import threading
import warnings
from typing import Any, cast

_PILLOW_MODULES = r"PIL\."


class PillowQuiet:
    """A context manager that many threads may hold at once: the filter stays until the last one leaves.

    `warnings.catch_warnings` swaps the filters of the whole process and is not safe between threads; one filter
    that only matches Pillow's modules is.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_holders = 0
        self._entry: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if self._entry is None or self._entry not in warnings.filters:
                warnings.filterwarnings("ignore", module=_PILLOW_MODULES)
                self._entry = warnings.filters[0]
            self._num_holders += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._num_holders -= 1
            filters = cast("list[Any]", warnings.filters)
            if self._num_holders == 0 and self._entry in filters:
                filters.remove(self._entry)


PILLOW_QUIET = PillowQuiet()
