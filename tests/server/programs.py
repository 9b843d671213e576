"""`kestrel serve` and other verbs as processes, started anew or forked from one that has imported everything.

Three quarters of a start are imports. Tests of what happens later, to a program that loads or runs, fork.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.server.long_request import pause_for_long_requests

ROOT = Path(__file__).parents[2]
FLAGS = ("--port", "0", "--device", "cpu", "--kv-cache-pages", "300", "--log-format", "json")
FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["kestrel.cli.app", "kestrel.cli.serve", "kestrel.cli.run_server"])


def instead(pairs: Sequence[str | Path], flags: Sequence[str | Path]) -> tuple[str | Path, ...]:
    """The flags, before them those of `pairs` (a flag, its value, and so on) that they do not give."""
    kept = [pair for pair in zip(pairs[::2], pairs[1::2], strict=True) if pair[0] not in flags]
    return (*(word for pair in kept for word in pair), *flags)


class Forked:
    """As much of `subprocess.Popen` as is needed here."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("kestrel serve", timeout or 0.0)
        return self._process.exitcode


class Program:
    """`is_forked`: without the imports, the warm-up, and the interpreter's own end."""

    def __init__(
        self,
        log: Path,
        *flags: str,
        is_forked: bool = True,
        num_files: int | None = None,
        hangs_after_steps: int | None = None,
        never_warm: bool = False,
    ) -> None:
        """When forked: `num_files` may be open, the worker's thread never comes back from the step after so many, and
        the warm-up never ends."""
        self._log = log
        log.touch()
        changes = (num_files, hangs_after_steps, never_warm)
        self.process = (
            forked_server(log, ["serve", *instead(FLAGS, flags)], *changes) if is_forked else _started(log, flags)
        )

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    @property
    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def wait_for(self, pattern: str, seconds: float = 60.0) -> str:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            if (match := re.search(pattern, self.log)) is not None:
                return match.group(match.lastindex or 0)
            time.sleep(0.02)
        raise AssertionError(f"no {pattern!r} in: {self.log}")

    def url(self) -> str:
        return self.wait_for(r"(http://127\.0\.0\.1:\d+)/")

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def _started(log: Path, flags: tuple[str, ...]) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        command = [sys.executable, "-m", "kestrel.main", "serve", *instead(FLAGS, flags)]
        return subprocess.Popen(command, cwd=ROOT, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"})


def forked_command(arguments: Sequence[str], output: Path, errors: Path, folder: Path = ROOT) -> Forked:
    """Any verb, with the interpreter's own end. Where it writes to a terminal, it reads from it too."""
    return Forked(FORKING.Process(target=_in_folder, args=(folder, _command, arguments, output, errors)))


def _in_folder(folder: Path, target: Callable[..., None], *arguments: Any) -> None:
    os.chdir(folder)
    target(*arguments)


def _command(arguments: Sequence[str], output: Path, errors: Path) -> None:
    import torch  # noqa: PLC0415

    from kestrel.main import main  # noqa: PLC0415

    os.setsid()
    for number, path in enumerate((output, errors), start=1):
        os.dup2(os.open(path, os.O_RDWR if path.is_char_device() else os.O_WRONLY), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", 1)
    if os.isatty(1):
        os.dup2(1, 0)
        sys.stdin = os.fdopen(0)
    torch.set_num_threads(1)
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as end:
        ctypes.pythonapi.Py_Exit(end.code)


def forked_server(log: Path, arguments: list[str], *changes: Any, folder: Path = ROOT) -> Forked:
    return Forked(FORKING.Process(target=_in_folder, args=(folder, _serve, log, arguments, *changes)))


def _serve(
    log: Path,
    arguments: list[str],
    num_files: int | None = None,
    hangs_after_steps: int | None = None,
    never_warm: bool = False,
) -> None:
    # Here and not above: this module is also what tests import.
    import torch  # noqa: PLC0415

    from kestrel.cli.app import run  # noqa: PLC0415
    from kestrel.scheduler import GenerationScheduler  # noqa: PLC0415
    from kestrel.server import lifecycle  # noqa: PLC0415

    with log.open("wb") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    if num_files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, num_files))
    torch.set_num_threads(1)

    async def warm_up(engine: Any) -> float:
        await asyncio.sleep(1000 if never_warm else 0)
        return 0.0

    lifecycle.warm_up = warm_up
    step, number = GenerationScheduler.step, itertools.count()

    def step_or_hang(scheduler: GenerationScheduler[Any]) -> Any:
        pause_for_long_requests(scheduler)
        return step(scheduler) if hangs_after_steps is None or next(number) < hangs_after_steps else time.sleep(1000)

    GenerationScheduler.step = step_or_hang
    sys.exit(run(arguments))
