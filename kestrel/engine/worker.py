"""The one thread that touches the accelerator: takes commands, steps the scheduler, hands updates out."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from kestrel.errors import EngineStopped, KestrelError
from kestrel.request import FinishReason, GenerationRequest, StreamUpdate
from kestrel.scheduler import GenerationScheduler


@dataclass(frozen=True, slots=True)
class Add:
    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class Cancel:
    request_id: str


@dataclass(frozen=True, slots=True)
class CancelAll:
    error: BaseException


@dataclass(frozen=True, slots=True)
class Fail:
    """What the worker needs is gone: it ends with this error."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Stop:
    """End the thread once nothing runs or waits any more."""


Command: TypeAlias = Add | Cancel | CancelAll | Fail | Stop


class EngineWorker:
    """Both callbacks run on the worker thread: `deliver` at most once per step, `on_fault` once, as its last act."""

    def __init__(
        self,
        scheduler: GenerationScheduler[Any],
        deliver: Callable[[list[StreamUpdate]], None],
        on_fault: Callable[[EngineStopped], None],
        name: str = "kestrel",
    ) -> None:
        self._scheduler = scheduler
        self._deliver = deliver
        self._on_fault = on_fault
        self._commands: deque[Command] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._closed = False
        self._fault: BaseException | None = None
        self._busy_since_s: float | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def fault(self) -> BaseException | None:
        """What killed the worker, if anything did."""
        return self._fault

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def busy_since_s(self) -> float | None:
        """When the turn that runs now began, by the monotonic clock; None while there is nothing to do."""
        return self._busy_since_s

    @property
    def is_preparing(self) -> bool:
        """Whether a turn runs now, or will once it is woken, that is not just waiting for the device."""
        has_work = self._busy_since_s is not None or bool(self._commands)
        return has_work and not self._scheduler.is_collecting

    def start(self) -> None:
        self._thread.start()

    def try_send(self, command: Command, *, wakes: bool = True) -> bool:
        """Hand a command over; False when nobody will ever read it. Without `wakes` it is read at the next `wake`, or
        before."""
        with self._wake:
            if self._closed:
                return False
            self._commands.append(command)
            if wakes:
                self._wake.notify()
            return True

    def wake(self) -> None:
        with self._wake:
            self._wake.notify()

    @property
    def num_unread(self) -> int:
        """Requests that were sent and that the scheduler has not got yet."""
        with self._wake:
            return sum(isinstance(command, Add) for command in self._commands)

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as fault:
            self._fault = fault
            with self._wake:
                self._closed = True
            error = EngineStopped(f"the engine's worker failed: {type(fault).__name__}: {fault}")
            error.__cause__ = fault
            self._on_fault(error)
        finally:
            self._busy_since_s = None

    def _turn(self) -> bool:
        """What is due, commands, one step, updates out; False at the end.

        Updates go out behind the launch of the next step: it runs while they are read.
        """
        self._busy_since_s = time.monotonic()
        updates = self._scheduler.settle()
        try:
            updates += self._apply(self._take_commands(may_wait=not updates))
            if self._scheduler.has_work:
                updates += self._scheduler.step()
        finally:  # also what was settled before something failed
            if updates:
                self._deliver(updates)
        return not self._is_over()

    def _take_commands(self, may_wait: bool) -> list[Command]:
        """Whatever has been sent; waits only when there is nothing else to do."""
        with self._wake:
            while may_wait and not self._commands and not self._scheduler.has_work and not self._stopping:
                self._busy_since_s = None
                self._wake.wait()
                self._busy_since_s = time.monotonic()
            commands = list(self._commands)
            self._commands.clear()
        return commands

    def _is_over(self) -> bool:
        """Whether to end; from then on no command is taken."""
        with self._wake:
            self._closed = self._stopping and not self._commands and not self._scheduler.has_work
            return self._closed

    def _apply(self, commands: list[Command]) -> list[StreamUpdate]:
        updates: list[StreamUpdate] = []
        for command in commands:
            match command:
                case Add(request):
                    try:
                        self._scheduler.add(request)
                    except KestrelError as error:
                        updates.append(failure(request.request_id, error))
                case Cancel(request_id):
                    self._scheduler.cancel(request_id)
                case CancelAll(error):
                    updates += self._scheduler.fail_all(error)
                case Fail(error):
                    raise error
                case Stop():
                    self._stopping = True
        return updates


def failure(request_id: str, error: BaseException) -> StreamUpdate:
    return StreamUpdate(request_id, finish_reason=FinishReason.ERROR, error=error)
