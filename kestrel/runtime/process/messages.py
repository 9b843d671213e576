"""What the two processes say to each other. Each message but those of loading has one answer, in order."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from multiprocessing import reduction
from multiprocessing.connection import Connection as Pipe
from struct import Struct
from typing import Any, TypeAlias

from kestrel.adapters.shared_memory import SentAdapter
from kestrel.errors import EngineStopped, KestrelError
from kestrel.images.picture import Picture, RgbImage
from kestrel.runtime.contract import StepOutput, StepPlan
from kestrel.runtime.process.packing import Packed, pack, portable, unpack

# ---------------------------------------------------------------------- to the process that computes


@dataclass(frozen=True, slots=True)
class RunStep:
    plan: StepPlan
    pictures: tuple[Picture, ...]
    """Those the plan names and the other side does not hold: packing leaves them out of the plan itself."""
    adapters: tuple[SentAdapter | None, ...] = ()
    """Of the plan's loads, in order: packing leaves them out of the plan too. None for what is no adapter."""

    @property
    def handles(self) -> list[int]:
        return [sent.handle for sent in self.adapters if sent is not None and sent.handle is not None]

    def with_handles(self, handles: Iterable[int]) -> RunStep:
        """On the side that received them: a handle has another number there."""
        theirs = iter(handles)
        adapters = (
            sent if sent is None or sent.handle is None else replace(sent, handle=next(theirs))
            for sent in self.adapters
        )
        return replace(self, adapters=tuple(adapters))


@dataclass(frozen=True, slots=True)
class Follow:
    """The first message to another rank: what to load, and which part of it. Of its steps it tells nothing."""

    task: Any


@dataclass(frozen=True, slots=True)
class RefineOutline:
    image: RgbImage
    svg_path: str
    bbox: Mapping[str, float]


# ---------------------------------------------------------------------- and back


@dataclass(frozen=True, slots=True)
class Loading:
    """How far loading is (see `kestrel.models.family`); comes unasked."""

    label: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """Comes unasked, once, when messages can be answered."""

    description: Any


@dataclass(frozen=True, slots=True)
class StepDone:
    output: StepOutput
    encoded: frozenset[str]
    """Pictures that slices have encoded and nobody has prefilled yet."""


@dataclass(frozen=True, slots=True)
class Refined:
    outline: tuple[str, dict[str, float]] | None


@dataclass(frozen=True, slots=True)
class Failed:
    error: Exception
    trace: str = ""
    """Where it happened, of an error that nobody raised on purpose."""

    @classmethod
    def by(cls, error: Exception) -> Failed:
        trace = "" if isinstance(error, KestrelError) else "".join(traceback.format_exception(error))
        return cls(portable(error), trace)


class RemoteTraceback(Exception):
    """Holds the traceback of the other process, as the cause of what is raised in this one."""


Message: TypeAlias = RunStep | Follow | RefineOutline | Loading | Loaded | StepDone | Refined | Failed


class Connection:
    """One end. A side that is gone shows as EngineStopped."""

    def __init__(self, pipe: Pipe[bytes, bytes]) -> None:
        self._pipe = pipe

    def send(self, message: Message) -> None:
        self.send_packed(pack(message), message.handles if isinstance(message, RunStep) else ())

    def send_packed(self, packed: Packed, handles: Iterable[int] = ()) -> None:
        """One that may go to several."""
        handles = list(handles)
        try:
            self._pipe.send_bytes(FOLLOWING.pack(len(packed.arrays), len(handles)) + packed.message)
            for array in packed.arrays:
                self._pipe.send_bytes(array)
            for handle in handles:
                reduction.send_handle(self._pipe, handle, None)
        except OSError as error:
            raise EngineStopped(GONE) from error

    def receive(self) -> Message:
        try:
            first = self._pipe.recv_bytes()
            num_arrays, num_handles = FOLLOWING.unpack_from(first)
            arrays = [self._pipe.recv_bytes() for _ in range(num_arrays)]
            handles = [reduction.recv_handle(self._pipe) for _ in range(num_handles)]
        except (EOFError, OSError) as error:
            raise EngineStopped(GONE) from error
        message = unpack(Packed(first[FOLLOWING.size :], arrays))
        return message.with_handles(handles) if handles else message

    def ask(self, message: Message) -> Message:
        """Send, and wait for the answer; raises the error that it may be."""
        self.send(message)
        return self.receive_answer()

    def receive_answer(self) -> Message:
        answer = self.receive()
        if isinstance(answer, Failed):
            raise answer.error from (RemoteTraceback(f"\n{answer.trace}") if answer.trace else None)
        return answer

    def last_words(self) -> Message | None:
        """What the other side had sent before it ended, if anything."""
        try:
            return self.receive() if self._pipe.poll() else None
        except (EngineStopped, OSError):
            return None

    def close(self) -> None:
        self._pipe.close()


FOLLOWING = Struct("<II")
"""Comes first: how many arrays follow the message, each by itself, and how many handles of files in memory."""
GONE = "the process that computes has ended; start the server again"
