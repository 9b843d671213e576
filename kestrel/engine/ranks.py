"""A model over several processes: this one is the first rank, and starts the others.

The others are fresh interpreters, since this one may have threads and a GPU already. Each gets the configuration and
where the model is, loads its part, and then runs every plan that the first rank runs (`kestrel.engine.rank_process`). A
rank that ends cannot be replaced: the rest ends with it.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, TypeVar

import torch

import kestrel
from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError, EngineStopped, RankLost
from kestrel.families import load, ready_from, ready_model, resolve
from kestrel.models.family import Progress
from kestrel.models.locate import LocatedModel
from kestrel.parallel.group import RankGroup
from kestrel.ready_model import ReadyModel
from kestrel.runtime.bring_up import Abilities, choose_fast_path
from kestrel.runtime.contract import Runtime, RuntimeLimits, StepOutput, StepPlan
from kestrel.runtime.device import choose_device, choose_dtype
from kestrel.runtime.memory import naming_memory_knobs
from kestrel.runtime.process import Connection
from kestrel.runtime.process.client import adapters_of
from kestrel.runtime.process.messages import Failed, Follow, Loaded, RunStep
from kestrel.runtime.process.packing import pack
from kestrel.runtime.process.pictures import HeldPictures

Result = TypeVar("Result")
ENDING_S = 2.0
"""Between the end of a rank's connections and that of its process, at most."""


@dataclass(frozen=True)
class RankTask:
    """What another rank has to know at its start."""

    rank: int
    config: RuntimeConfig
    located: LocatedModel
    with_adapters: bool
    meeting: Path
    """A file by which the ranks find each other."""
    num_threads: int


def prepared_model(
    config: RuntimeConfig,
    progress: Progress | None = None,
    *,
    with_adapters: bool = False,
    leaving: Leaving | None = None,
) -> ReadyModel:
    """`ready_model`, in as many processes as the configuration asks for. They end when their caller is `leaving`."""
    if config.tensor_parallel_size == 1:
        return ready_model(config, progress, with_adapters=with_adapters)
    if not torch.distributed.is_available():
        raise ConfigError(
            "tensor_parallel_size", "torch has no torch.distributed in this build; use 1, or another build"
        )
    device, dtype = rank_device(config, 0), choose_dtype(config, choose_device(config))
    choose_fast_path(config, Abilities.of(device), dtype)  # a refusal comes before the download
    others = OtherRanks(config.tensor_parallel_size)
    if leaving is not None:
        leaving.ends(others)
    with others.ending_together(), naming_memory_knobs():
        num_threads = min(torch.get_num_threads(), max(1, (os.cpu_count() or 1) // config.tensor_parallel_size))
        torch.set_num_threads(num_threads)
        task = RankTask(0, config, resolve(config), with_adapters, others.meeting, num_threads)
        others.begin(task)
        loaded = load(task.located, device, dtype, progress, others.group)
        others.wait_until_loaded()

        def start() -> ReadyModel:
            others.group.connect(device)
            return ready_from(loaded, config, with_adapters)

        ready = others.unless_lost(start)
    return replace(ready, runtime=LeadingRuntime(ready.runtime, others), others=others)


def rank_device(config: RuntimeConfig, rank: int) -> torch.device:
    """Refuses what the machine has not got."""
    device, size = choose_device(config), config.tensor_parallel_size
    if device.type != "cuda":
        return device
    if size > torch.cuda.device_count():
        raise ConfigError(
            "tensor_parallel_size",
            f"{size} needs as many GPUs, and this machine has {torch.cuda.device_count()}; lower it, or use device cpu",
        )
    return torch.device("cuda", rank)


# ---------------------------------------------------------------------- the other processes


def start_rank(pipe: Pipe[bytes, bytes]) -> subprocess.Popen[bytes]:
    """A fresh interpreter at this end of a pipe. It finds the package however this process did. The signals of a
    terminal are for this process alone, which may let requests finish first."""
    paths = (str(Path(kestrel.__file__).parents[1]), os.environ.get("PYTHONPATH", ""))
    return subprocess.Popen(
        [sys.executable, "-m", "kestrel.engine.rank_process", str(pipe.fileno()), str(os.getpid())],
        pass_fds=[pipe.fileno()],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        start_new_session=True,
    )


class OtherRank:
    def __init__(self, rank: int) -> None:
        ours, theirs = multiprocessing.Pipe()
        self.rank = rank
        self.connection = Connection(ours)
        self.process = start_rank(theirs)
        theirs.close()

    def ending(self) -> RankLost:
        """That it has ended, and why, as far as it or the system can tell."""
        code = self.process.poll()
        how = "was killed (signal 9: perhaps the system was out of memory)"
        if code != -signal.SIGKILL:
            how = f"has ended ({f'signal {-code}' if code and code < 0 else f'exit code {code}'})"
        said = self.connection.last_words()
        why = f": {type(said.error).__name__}: {said.error}" if isinstance(said, Failed) else ""
        return RankLost(f"rank {self.rank} of tensor_parallel_size {how}{why}")


class OtherRanks:
    """Used by one thread, but for `watch` and `close`."""

    def __init__(self, size: int) -> None:
        folder = Path(tempfile.mkdtemp(prefix="kestrel-ranks-"))
        self.meeting = folder / "meeting"
        self.group = RankGroup(0, size)
        self.group.meet(self.meeting)
        self._is_closing = False
        self._lost: EngineStopped | None = None
        self._looking = threading.Lock()
        self._told: list[Callable[[EngineStopped], None]] = []
        self._others = [OtherRank(rank) for rank in range(1, size)]
        self._end = weakref.finalize(self, _end_processes, self._others, folder)  # at the end of this process at last
        for other in self._others:
            threading.Thread(target=self._wait, args=(other,), name="kestrel-watch", daemon=True).start()

    @property
    def pids(self) -> list[int]:
        return [other.process.pid for other in self._others]

    def begin(self, task: RankTask) -> None:
        for other in self._others:
            other.connection.send(Follow(replace(task, rank=other.rank)))

    def wait_until_loaded(self) -> None:
        """Raises what loading raised there."""
        for other in self._others:
            answer = other.connection.receive_answer()
            assert isinstance(answer, Loaded)

    def unless_lost(self, work: Callable[[], Result]) -> Result:
        """In a thread that is left behind when a rank ends: torch would wait for it until its time limit."""
        outcome: Future[Result] = Future()

        def run() -> None:
            try:
                result = work()
            except BaseException as error:
                self._fail(outcome, error)
            else:
                with suppress(InvalidStateError):
                    outcome.set_result(result)

        self.watch(lambda lost: self._fail(outcome, lost))
        threading.Thread(target=run, name="kestrel-start", daemon=True).start()
        return outcome.result()

    @staticmethod
    def _fail(outcome: Future[Any], error: BaseException) -> None:
        with suppress(InvalidStateError):  # it has another outcome already
            outcome.set_exception(error)

    def send(self, message: RunStep) -> None:
        packed = pack(message)
        for other in self._others:
            other.connection.send_packed(packed, message.handles)

    @contextmanager
    def ending_together(self) -> Iterator[None]:
        """What fails inside ends all; where the reason is that a rank has ended, that is what is raised."""
        try:
            yield
        except Exception as error:
            lost = self._loss() if isinstance(error, (RuntimeError, EngineStopped)) else None
            self.close()
            if lost is None:
                raise
            raise lost from error

    def _loss(self) -> EngineStopped | None:
        """What became of the rank that ended first, or ends in a moment: its connections break before."""
        deadline = time.monotonic() + ENDING_S
        with self._looking:
            while self._lost is None and not self._is_closing and time.monotonic() < deadline:
                ended = [other for other in self._others if other.process.poll() is not None]
                if ended:  # those that fail because another is gone end by themselves
                    self._lost = min(ended, key=lambda other: (other.process.poll() or 0) >= 0).ending()
                time.sleep(0.0 if ended else 0.01)
            return self._lost

    def watch(self, on_end: Callable[[EngineStopped], None]) -> None:
        """Call `on_end`, from a thread, if a rank ends before `close`."""
        self._told.append(on_end)
        if self._lost is not None:
            on_end(self._lost)

    def _wait(self, other: OtherRank) -> None:
        other.process.wait()
        lost = self._loss()
        if lost is not None:
            self.close()
            for on_end in tuple(self._told):
                on_end(lost)

    def close(self) -> None:
        """Also while a step runs, which fails then."""
        self._is_closing = True
        self._end()
        self.group.end()

    def abandon(self) -> None:
        """Nobody wants the model: what waits for a rank gets an error, from the threads that watch them."""
        self._lost = EngineStopped("the process that asked for the model has ended; create a new engine")
        self.close()


class Leaving:
    """For those who wait for a model and may leave before it is there. Used by two threads."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._others: OtherRanks | None = None
        self._has_left = False

    def ends(self, others: OtherRanks) -> None:
        with self._changing:
            self._others = others
        if self._has_left:
            others.abandon()

    def leave(self) -> None:
        with self._changing:
            self._has_left = True
        if self._others is not None:
            self._others.abandon()


def _end_processes(others: Sequence[OtherRank], folder: Path) -> None:
    for other in others:
        other.process.kill()
    for other in others:
        other.process.wait()
        other.connection.close()
    shutil.rmtree(folder, ignore_errors=True)


class LeadingRuntime:
    """The first rank's runtime: what it runs, the others run too."""

    def __init__(self, runtime: Runtime[Any], others: OtherRanks) -> None:
        self._runtime = runtime
        self._others = others
        self._pictures = HeldPictures()

    @property
    def limits(self) -> RuntimeLimits:
        return self._runtime.limits

    def launch(self, plan: StepPlan) -> Any:
        with self._others.ending_together():
            self._others.send(RunStep(plan, self._pictures.missing(plan), adapters_of(plan)))
            return self._runtime.launch(plan)

    def collect(self, step: Any) -> StepOutput:
        with self._others.ending_together():
            return self._runtime.collect(step)

    def has_encoded(self, digest: str) -> bool:
        return self._runtime.has_encoded(digest)
