"""What becomes of freed memory: a process that computes keeps it for a while, one that only serves gives it back.

glibc gives large freed blocks back to the system and gets them anew, page by page, moments later; with the tensors of a
model on a CPU that is tens of thousands of page faults for each picture. A server beside such a process frees bodies
and pictures of all sizes from several threads: kept, they would stay resident at the size of its busiest moment.
Other C libraries have no such settings.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
KEPT_BYTES = 2**30
"""Freed memory that is kept, and the size from which a block is mapped on its own."""
RETURNED_BYTES = 2**17
"""The same for a process that gives memory back."""
NUM_ARENAS = 2
"""Heaps that threads share. By default there are eight for each core, and each keeps its own free blocks."""
OLD_MMAP_LIMIT_BYTES = 2**25
"""The most that releases before 2.35 take for the latter."""
SERVING_TRIM_S, COMPUTING_TRIM_S = 5.0, 30.0
"""Between two times that all freed memory is given back. A process that computes needs it again immediately, so there
it is done rarely: only that it does not stay as large as its busiest moment."""
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES")
"""Where an operator may have decided otherwise."""


def keep_freed_memory(trim_every_s: float = COMPUTING_TRIM_S) -> bool:
    """For a process that computes, before anything large is allocated. False where not possible or not wanted."""
    if not _may_choose():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    keeps = mallopt(M_TRIM_THRESHOLD, KEPT_BYTES) == 1
    maps_less = any(mallopt(M_MMAP_THRESHOLD, size) == 1 for size in (KEPT_BYTES, OLD_MMAP_LIMIT_BYTES))
    _trim_every(trim_every_s)
    return keeps and maps_less


def give_back_freed_memory() -> bool:
    """For a process that serves and does not compute, before it has threads. False where not possible or not wanted."""
    if not _may_choose():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    wanted = ((M_TRIM_THRESHOLD, RETURNED_BYTES), (M_MMAP_THRESHOLD, RETURNED_BYTES), (M_ARENA_MAX, NUM_ARENAS))
    gives_back = all(mallopt(setting, value) == 1 for setting, value in wanted)
    _trim_every(SERVING_TRIM_S)
    return gives_back


def _trim_every(period_s: float) -> None:
    """Free blocks below one that is still in use leave only this way. The call releases the GIL."""
    malloc_trim = ctypes.CDLL(None).malloc_trim

    def trim_for_ever() -> None:
        while True:
            time.sleep(period_s)
            malloc_trim(0)

    threading.Thread(target=trim_for_ever, name="kestrel-trim", daemon=True).start()


def _may_choose() -> bool:
    return _is_glibc() and not any(name in os.environ for name in VARIABLES)


def _is_glibc() -> bool:
    if sys.platform != "linux":
        return False
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (ValueError, OSError):
        return False
