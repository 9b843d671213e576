"""Freed memory is kept for a while: large blocks come and go without page faults, and a busy moment passes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kestrel.engine import allocator

LIBC = """
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
"""
PROGRAM = """
import resource, runpy
kept = runpy.run_path({module!r})["keep_freed_memory"]() if {asks} else None
def use():
    block = libc.malloc(24 * 2**20)
    libc.memset(block, 1, 24 * 2**20)
    libc.free(block)
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    # A second size in between keeps the system's own growing threshold from hiding the matter.
    use()
    other = libc.malloc(40 * 2**20); libc.memset(other, 1, 40 * 2**20); libc.free(other)
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
IS_GLIBC = sys.platform == "linux" and "CS_GNU_LIBC_VERSION" in os.confstr_names


def outcome(*, asks: bool, **variables: str) -> tuple[str, int]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC", "GLIBC"))}
    done = subprocess.run(
        [sys.executable, "-c", LIBC + PROGRAM.format(asks=asks, module=allocator.__file__)],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    kept, faults = done.stdout.split()
    return kept, int(faults)


@pytest.mark.skipif(not IS_GLIBC, reason="glibc only")
def test_large_blocks_come_and_go_without_page_faults() -> None:
    pages = 20 * 64 * 2**20 // os.sysconf("SC_PAGE_SIZE")
    assert outcome(asks=False)[1] > pages // 4
    kept, faults = outcome(asks=True)
    assert kept == "True"
    assert faults < pages // 50


@pytest.mark.skipif(not IS_GLIBC, reason="glibc only")
def test_an_operator_who_decided_otherwise_is_obeyed() -> None:
    kept, _ = outcome(asks=True, MALLOC_TRIM_THRESHOLD_="131072")
    assert kept == "False"


KEPT_FOR_A_WHILE = """
import runpy, time
assert runpy.run_path({module!r})["keep_freed_memory"](0.5)
def resident_mib():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) / 256
before = resident_mib()
block, last = libc.malloc(200 * 2**20), libc.malloc(100)
libc.memset(block, 1, 200 * 2**20)
libc.free(block)
kept = resident_mib() - before
time.sleep(1.5)
print(kept, resident_mib() - before)
"""


@pytest.mark.skipif(not IS_GLIBC, reason="glibc only")
def test_what_a_busy_moment_took_is_given_back_in_the_end() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC", "GLIBC"))}
    program = LIBC + KEPT_FOR_A_WHILE.format(module=allocator.__file__)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    kept, later = map(float, done.stdout.split())
    assert kept > 190
    assert later < 20
