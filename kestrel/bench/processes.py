"""Processes that benchmarks start and watch: servers, the memory they hold, the CPU time they use."""

from __future__ import annotations

import math
import os
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

START_S = 120.0

ServerT = TypeVar("ServerT", bound="ServerProcess")


class ServerProcess:
    """A server in a process of its own; what it prints is kept."""

    def __init__(self, command: Sequence[str | Path], environment: dict[str, str], folder: Path | None = None) -> None:
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, env=environment, cwd=folder
        )

    def __enter__(self: ServerT) -> ServerT:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)
        self._log.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text(encoding="utf-8", errors="replace")

    def logged(self, pattern: str) -> str:
        """The first group of a pattern, once the log has it. A server that does not come so far is ended."""
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            found = re.search(pattern, self.log)
            if found is not None:
                return found.group(1)
            time.sleep(0.05)
        self._process.kill()
        raise RuntimeError(f"the server did not start: {self.log[-4000:]}")


def plain_environment() -> dict[str, str]:
    """As an operator has it, but for one thread of the model."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def steady_environment() -> dict[str, str]:
    """For comparisons: one thread, and freed memory kept. Whether glibc gives it back after every step, at up to half
    the speed, is a matter of luck."""
    kept = str(2**30)
    return {**plain_environment(), "MALLOC_TRIM_THRESHOLD_": kept, "MALLOC_MMAP_THRESHOLD_": kept}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def status_mib(name: str = "VmRSS", pid: int | None = None) -> float:
    """A line of /proc/PID/status, by default of this process; nan where the system does not tell."""
    try:
        status = Path(f"/proc/{pid or os.getpid()}/status").read_text()
    except OSError:
        return math.nan
    return next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith(f"{name}:")), 0.0)


def resident_mib(pid: int) -> list[float]:
    """Of a process and of those it started, in that order; empty once it has ended."""
    own = status_mib("VmRSS", pid)
    try:
        return [own, *(size for child in children_of(pid) for size in resident_mib(child))]
    except OSError:
        return []


def cpu_seconds_of(pid: int) -> float:
    """User and system time of a running process and of those it started; nan where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        children = children_of(pid)
    except OSError:
        return math.nan
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(map(cpu_seconds_of, children))


def children_of(pid: int) -> list[int]:
    """The processes that it started, the first one first. Raises OSError where the system does not tell."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
