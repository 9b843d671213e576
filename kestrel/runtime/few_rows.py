"""Steps of few positions on ARM processors, without oneDNN.

There it takes most of a millisecond to begin a product, whatever its size, and an activation nearly as long. torch's
other routines have multiplied a few rows by then. Whole pictures and prompts are better off with it.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch.backends import mkldnn

MOST_ROWS = 128
ARM = ("aarch64", "arm64")

_lock = threading.Lock()
_num_inside = 0
_was_enabled = True


@contextmanager
def few_rows(device: torch.device, num_rows: int) -> Iterator[None]:
    """What a step of `num_rows` positions is computed in. The switch is one for the process: the last one out turns it
    back."""
    if num_rows > MOST_ROWS or device.type != "cpu" or not begins_slowly():
        yield
        return
    _enter()
    try:
        yield
    finally:
        _leave()


@lru_cache(maxsize=1)
def begins_slowly() -> bool:
    return platform.machine() in ARM and mkldnn.is_available()


def _enter() -> None:
    global _num_inside, _was_enabled
    with _lock:
        if _num_inside == 0:
            _was_enabled, mkldnn.enabled = mkldnn.enabled, False
        _num_inside += 1


def _leave() -> None:
    global _num_inside
    with _lock:
        _num_inside -= 1
        if _num_inside == 0:
            mkldnn.enabled = _was_enabled
