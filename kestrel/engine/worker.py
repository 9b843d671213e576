"""The one thread that touches the accelerator: takes commands, steps the scheduler, hands updates out."""

from __future__ import annotations

import threading
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
class Stop:
    """End the thread once nothing runs or waits any more."""


Command: TypeAlias = Add | Cancel | CancelAll | Stop


class EngineWorker:
    """`deliver` is called on the worker thread with each step's updates, at most once per step."""

    def __init__(
        self, scheduler: GenerationScheduler[Any], deliver: Callable[[list[StreamUpdate]], None], name: str = "kestrel"
    ) -> None:
        self._scheduler = scheduler
        self._deliver = deliver
        self._commands: deque[Command] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def fault(self) -> BaseException | None:
        """What killed the worker, if anything did."""
        return self._fault

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def send(self, command: Command) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; False when it still runs."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while True:
                updates = self._apply(self._take_commands())
                if self._scheduler.has_work:
                    updates += self._scheduler.step()
                elif self._stopping:
                    break
                if updates:
                    self._deliver(updates)
        except BaseException as fault:
            self._fault = fault
            self._fail_everything(fault)

    def _take_commands(self) -> list[Command]:
        """Whatever has been sent; waits only when there is nothing else to do."""
        with self._wake:
            while not self._commands and not self._scheduler.has_work and not self._stopping:
                self._wake.wait()
            commands = list(self._commands)
            self._commands.clear()
        return commands

    def _apply(self, commands: list[Command]) -> list[StreamUpdate]:
        refused: list[StreamUpdate] = []
        for command in commands:
            match command:
                case Add(request):
                    try:
                        self._scheduler.add(request)
                    except KestrelError as error:
                        refused.append(failure(request.request_id, error))
                case Cancel(request_id):
                    self._scheduler.cancel(request_id)
                case CancelAll(error):
                    refused += self._scheduler.fail_all(error)
                case Stop():
                    self._stopping = True
        return refused

    def _fail_everything(self, fault: BaseException) -> None:
        error = EngineStopped(f"the engine's worker failed: {type(fault).__name__}: {fault}")
        error.__cause__ = fault
        updates = self._scheduler.fail_all(error)
        with self._wake:
            left = [command.request.request_id for command in self._commands if isinstance(command, Add)]
            self._commands.clear()
        self._deliver(updates + [failure(request_id, error) for request_id in left])


def failure(request_id: str, error: BaseException) -> StreamUpdate:
    return StreamUpdate(request_id, finish_reason=FinishReason.ERROR, error=error)
