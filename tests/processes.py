"""Other processes, as the system shows them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def eventually(is_so: Callable[[], bool], seconds: float = 60.0, nap_s: float = 0.02) -> bool:
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(nap_s)
    return is_so()


def has_ended(pid: int) -> bool:
    """Also when nobody has asked for its exit code yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def children(pid: int) -> list[int]:
    """Of any of its threads."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []
    return [child for thread in threads for child in _children_of_thread(thread)]


def _children_of_thread(thread: Path) -> list[int]:
    try:
        return [int(child) for child in (thread / "children").read_text().split()]
    except OSError:  # it has ended meanwhile
        return []


def tree(pid: int) -> list[int]:
    """A process and everything below it."""
    return [pid, *(one for child in children(pid) for one in tree(child))]
