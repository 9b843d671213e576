"""Keeps what Pillow and its libraries say about odd files from the caller and the log; touches nothing of other code.

Whoever sends a damaged file could otherwise fill a log: a decoder may have a line to say about every row.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import warnings
from functools import cache
from typing import Any, cast

from PIL import Image

_PILLOW_MODULES = r"PIL\."
_PILLOW_LOGGER = logging.getLogger("PIL")
_NOWHERE = logging.NullHandler()


class PillowQuiet:
    """A context manager that many threads may hold at once: the filter stays until the last one leaves.

    `warnings.catch_warnings` swaps the filters of the whole process and is not safe between threads; one filter
    that only matches Pillow's modules is.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_holders = 0
        self._entry: Any = None
        self._propagated = True

    def __enter__(self) -> None:
        with self._lock:
            if self._entry is None or self._entry not in warnings.filters:
                warnings.filterwarnings("ignore", module=_PILLOW_MODULES)
                self._entry = warnings.filters[0]
            if self._num_holders == 0:
                self._propagated = _PILLOW_LOGGER.propagate
                _PILLOW_LOGGER.addHandler(_NOWHERE)
                _PILLOW_LOGGER.propagate = False
            self._num_holders += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._num_holders -= 1
            if self._num_holders == 0:
                _PILLOW_LOGGER.removeHandler(_NOWHERE)
                _PILLOW_LOGGER.propagate = self._propagated
            filters = cast("list[Any]", warnings.filters)
            if self._num_holders == 0 and self._entry in filters:
                filters.remove(self._entry)


PILLOW_QUIET = PillowQuiet()


@cache
def silence_libtiff() -> None:
    """Once, for the process: libtiff writes straight to standard error. That a file is damaged is said anyway.

    The functions are looked up in the library that Pillow has loaded; where they cannot be, it goes on writing.
    """
    try:
        library = ctypes.CDLL(Image.core.__file__)
        setters = [getattr(library, name) for name in ("TIFFSetErrorHandler", "TIFFSetWarningHandler")]
    except (OSError, AttributeError):
        return
    for setter in setters:
        setter.argtypes, setter.restype = [ctypes.c_void_p], ctypes.c_void_p
        setter(None)
