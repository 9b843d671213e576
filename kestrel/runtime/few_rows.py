"""Steps of few positions on ARM processors, without oneDNN.

There it takes up to most of a millisecond to begin a product, whatever its size. torch's other routines have multiplied
a few rows by then. Whole pictures and prompts are better off with it, and so is bfloat16 where it multiplies that.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.backends import mkldnn

from kestrel.runtime.wide_products import has_fast_bfloat16

MOST_ROWS = 128
ARM = ("aarch64", "arm64")

_lock = threading.Lock()
_num_inside = 0
_was_enabled = True


@contextmanager
def few_rows(device: torch.device, dtype: torch.dtype, num_rows: int) -> Iterator[None]:
    """What a step of `num_rows` positions is computed in. The switch is one for the process: the last one out turns it
    back."""
    if num_rows > MOST_ROWS or device.type != "cpu" or not begins_slowly(dtype):
        yield
        return
    _enter()
    try:
        yield
    finally:
        _leave()


def begins_slowly(dtype: torch.dtype) -> bool:
    """Only oneDNN multiplies bfloat16 at all well, where it does."""
    is_its_own = dtype == torch.bfloat16 and has_fast_bfloat16()
    return platform.machine() in ARM and mkldnn.is_available() and not is_its_own


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
