"""Memory that a step frees stays with the process, for the next step to use.

glibc gives large freed blocks back to the system and gets them anew, page by page, moments later; with the tensors of a
model on a CPU that is tens of thousands of page faults for each picture. Other C libraries have no such settings.
"""

from __future__ import annotations

import ctypes
import os
import sys

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
KEPT_BYTES = 2**30
"""Freed memory that is kept, and the size from which a block is mapped on its own."""
OLD_MMAP_LIMIT_BYTES = 2**25
"""The most that releases before 2.35 take for the latter."""
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Where an operator may have decided otherwise."""


def keep_freed_memory() -> bool:
    """For the whole process, before anything large is allocated. False where it is not possible or not wanted."""
    if not _is_glibc() or any(name in os.environ for name in VARIABLES):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    keeps = mallopt(M_TRIM_THRESHOLD, KEPT_BYTES) == 1
    maps_less = any(mallopt(M_MMAP_THRESHOLD, size) == 1 for size in (KEPT_BYTES, OLD_MMAP_LIMIT_BYTES))
    return keeps and maps_less


def _is_glibc() -> bool:
    if sys.platform != "linux":
        return False
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (ValueError, OSError):
        return False
