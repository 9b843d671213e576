"""A model in a process of its own, for an engine in this one.

The process is forked before this one has threads or a model, so that it starts with everything imported. It ends with
this one, however that ends.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields
from multiprocessing.connection import Pipe, wait
from types import TracebackType
from typing import Any

from kestrel.adapters.sources import given_key, has_adapter_source
from kestrel.config import RuntimeConfig
from kestrel.engine.ranks import prepared_model
from kestrel.errors import EngineStopped
from kestrel.models.family import Progress, no_progress
from kestrel.ready_model import ReadyModel
from kestrel.runtime.contract import RuntimeLimits
from kestrel.runtime.device import choose_device
from kestrel.runtime.process import Connection, ProcessRefiner, ProcessRuntime, answer_messages
from kestrel.runtime.process.messages import Failed, Loaded, Loading, Message

PR_SET_PDEATHSIG = 1
SIGNALS = (signal.SIGINT, signal.SIGTERM)
NEAR_THE_MODEL = ("runtime", "refiner", "computes_apart", "others")
"""Fields of a `ReadyModel` that differ on the other side of a connection."""
ENDING_S = 2.0
"""Between the end of a connection and that of its process."""
TELLING_S = 1.0
logger = logging.getLogger("kestrel.runtime")


def can_compute_apart(config: RuntimeConfig) -> bool:
    """On a CPU under Linux. A GPU computes beside the interpreter anyhow, and elsewhere forking is not safe."""
    return sys.platform == "linux" and choose_device(config).type == "cpu"


@dataclass(frozen=True)
class ModelDescription:
    """What a `ReadyModel` says of itself, without what cannot leave its process."""

    limits: RuntimeLimits
    has_refiner: bool
    facts: dict[str, Any]
    """The other fields."""

    @classmethod
    def of(cls, ready: ReadyModel) -> ModelDescription:
        facts = {field.name: getattr(ready, field.name) for field in fields(ready) if field.name not in NEAR_THE_MODEL}
        return cls(ready.runtime.limits, ready.refiner is not None, facts)

    def reached_by(self, connection: Connection) -> ReadyModel:
        """The model as seen from the other end of the connection."""
        return ReadyModel(
            **self.facts,
            runtime=ProcessRuntime(connection, self.limits),
            refiner=ProcessRefiner(connection, self.limits) if self.has_refiner else None,
            computes_apart=True,
        )


class ComputeProcess:
    """Loads the model from its start on; `ready` waits for that. To be made before this process has other threads."""

    def __init__(self, config: RuntimeConfig, prepare: Callable[[], None] | None = None) -> None:
        """`prepare` runs there first."""
        ours, theirs = Pipe()
        self._connection = Connection(ours)
        self._is_closing = False

        def run() -> None:
            ours.close()  # or the end of this process would not show there
            _end_with_the_parent()
            if prepare is not None:
                prepare()
            # Not in this thread: if it has computed before the fork, OpenMP would wait for threads that stayed there.
            with ThreadPoolExecutor(1, "kestrel-compute") as thread:
                thread.submit(_load_and_answer, Connection(theirs), config).result()

        self._process = multiprocessing.get_context("fork").Process(target=run, name="kestrel-compute", daemon=True)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        atexit.register(self.kill)  # multiprocessing would ask it to end by a signal that it ignores, and wait

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def ready(self, progress: Progress | None = None) -> ReadyModel:
        """Raises what loading raised there."""
        report = progress or no_progress
        while True:
            message = self._receive_while_loading()
            match message:
                case Loading(label, done_bytes, total_bytes):
                    report(label, done_bytes, total_bytes)
                case Loaded(description):
                    return description.reached_by(self._connection)
                case _:
                    raise AssertionError(f"{type(message).__name__} while loading")

    def _receive_while_loading(self) -> Message:
        try:
            return self._connection.receive_answer()
        except EngineStopped as error:
            self._process.join(ENDING_S)
            raise EngineStopped(f"{self.ending()} while it loaded the model") from error

    def ending(self) -> str:
        """That it has ended, and how, for whoever was not told in time."""
        code = self._process.exitcode
        if code == -signal.SIGKILL:
            return "the process that computes has ended (signal 9: perhaps the system was out of memory)"
        return (
            f"the process that computes has ended ({f'signal {-code}' if code and code < 0 else f'exit code {code}'})"
        )

    @property
    def has_died(self) -> bool:
        """Whether it ended by itself."""
        return not self._is_closing and not self._process.is_alive()

    def watch(self, on_death: Callable[[EngineStopped], None]) -> None:
        """Call `on_death`, from a thread, if the process ends before `close`."""
        threading.Thread(target=self._wait, args=(on_death,), name="kestrel-watch", daemon=True).start()

    def _wait(self, on_death: Callable[[EngineStopped], None]) -> None:
        wait([self._process.sentinel])
        if not self._is_closing:
            self._process.join()
            on_death(EngineStopped(self.ending()))

    def kill(self) -> None:
        """Whoever still waits gets EngineStopped."""
        self._is_closing = True
        self._process.kill()

    def close(self) -> None:
        atexit.unregister(self.kill)
        self.kill()
        self._process.join()
        self._connection.close()

    def __enter__(self) -> ComputeProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _load_and_answer(connection: Connection, config: RuntimeConfig) -> None:
    def report(label: str, done_bytes: int, total_bytes: int) -> None:
        connection.send(Loading(label, done_bytes, total_bytes))

    try:
        ready = prepared_model(config, report, with_adapters=has_adapter_source(config, given_key()))
    except Exception as error:
        with suppress(EngineStopped):  # nobody is there to be told
            connection.send(Failed.by(error))
        return
    if ready.others is not None:
        ready.others.watch(_end_with_a_rank)
    connection.send(Loaded(ModelDescription.of(ready)))
    gc.collect()
    gc.freeze()  # the model and the modules stay: no collection in the middle of a step need look at them
    answer_messages(connection, ready.runtime, ready.refiner)


def _end_with_a_rank(error: EngineStopped) -> None:
    """A step that runs has failed by itself, and is given time to tell."""
    logger.error("%s", error)
    time.sleep(TELLING_S)
    os._exit(1)


def _end_with_the_parent() -> None:
    """Signals to a whole group are for the parent, which may let requests finish first; when it is gone, so is this."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
