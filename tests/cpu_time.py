"""Processor time of this thread, for the ratio of two pieces of work: the machine and what else it does cancel out."""

from __future__ import annotations

import time
from collections.abc import Callable


def least_cpu_s(work: Callable[[], object], tries: int = 3) -> float:
    return min(_cpu_s(work) for _ in range(tries))


def _cpu_s(work: Callable[[], object]) -> float:
    began_s = time.thread_time()
    work()
    return time.thread_time() - began_s
