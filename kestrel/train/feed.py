"""Batches of scenes and their packed tasks, made ahead by worker processes.

Batch k depends on the plan and k alone: worker processes make every n-th batch each, and the feed takes from them in
turn. So the order is the same for any number of workers, and a run can go on where another stopped.

Each worker has a pipe of its own, whose writing end nobody else holds. So the end of a worker, whatever the reason, is
the end of its pipe, in the middle of a message too; and ending the workers is all that closing needs.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import signal
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from random import Random
from types import TracebackType
from typing import TypeAlias

import numpy as np

from kestrel.errors import ConfigError, KestrelError
from kestrel.skills import default_registry
from kestrel.train.packing import IMAGE_POSITIONS, PackedTasks, pack
from kestrel.train.scenes.sampling import FIRST_HELD_OUT_SEED, sample_batch, scene_at
from kestrel.train.scenes.truth import SceneBatch
from kestrel.train.tasks.example import PromptFormat, TaskEncoder
from kestrel.train.tasks.mix import EVERYTHING, Course, sample_tasks
from kestrel.train.tasks.view import OutlineBook, task_world

_BATCHES_AHEAD = 4
_PATIENCE_S = 5.0
"""How long to wait for a process that was killed."""

FedBatch: TypeAlias = tuple[SceneBatch, PackedTasks]


class FeedError(KestrelError):
    """A worker process failed; its own traceback is in the message."""


@dataclass(frozen=True)
class FeedPlan:
    """What the batches are made of. Batch k has the seeds from start_seed + k * batch_size on."""

    prompt_format: PromptFormat
    outlines: OutlineBook
    start_seed: int = 0
    batch_size: int = 192
    sizes: tuple[tuple[int, int], ...] = ((378, 378),)
    """Heights and widths; each batch takes one by chance."""
    courses: tuple[Course, ...] = (EVERYTHING,)
    """What is shown and asked; each batch takes one by chance, by their shares."""
    tasks_per_scene: int = 6
    length: int = 256
    """Input positions per scene behind the picture."""
    image_positions: int = IMAGE_POSITIONS

    def __post_init__(self) -> None:
        for name in ("batch_size", "tasks_per_scene", "length", "image_positions"):
            if self.__dict__[name] < 1:
                raise ConfigError(name, f"must be 1 or more (got {self.__dict__[name]})")
        if not 0 <= self.start_seed < FIRST_HELD_OUT_SEED // 2:
            raise ConfigError("start_seed", f"must be from 0 to {FIRST_HELD_OUT_SEED // 2 - 1} (got {self.start_seed})")
        if not self.sizes:
            raise ConfigError("sizes", "is empty; give at least one height and width")
        if not self.courses:
            raise ConfigError("courses", "is empty; give at least one")


class BatchMaker:
    """Makes any batch of a plan."""

    def __init__(self, plan: FeedPlan) -> None:
        self._plan = plan
        self._profile = plan.prompt_format.profile()
        self._encoder = TaskEncoder(self._profile, default_registry(lambda: 0))
        self._world = task_world(plan.outlines)

    def batch(self, index: int) -> FedBatch:
        plan = self._plan
        first = plan.start_seed + index * plan.batch_size
        seeds = np.arange(first, first + plan.batch_size, dtype=np.int64)
        rng = Random(first)
        height, width = rng.choice(plan.sizes)
        course = rng.choices(plan.courses, [each.share for each in plan.courses])[0]
        scenes = sample_batch(seeds, height, width, course.difficulty)
        encoded = []
        for row, seed in enumerate(seeds):
            scene = scene_at(scenes, row)
            examples = sample_tasks(scene, Random(int(seed)), course.mix, plan.tasks_per_scene, self._world)
            encoded.append([self._encoder.encode(example) for example in examples])
        assert self._profile.regions is not None
        return scenes, pack(encoded, plan.length, self._profile.regions, plan.image_positions)


class ExampleFeed:
    """Endless batches in order. Close it, or use it in a `with` block; without workers batches are made on demand.

    One thread takes batches; any thread may close.
    """

    def __init__(self, plan: FeedPlan, workers: int, first_batch: int = 0) -> None:
        if workers < 0:
            raise ConfigError("workers", f"must be 0 or more (got {workers})")
        self._first = self._next = first_batch
        self._maker = BatchMaker(plan) if workers == 0 else None
        self._is_closed = False
        self._taking = threading.Lock()
        self._workers: list[_Worker] = []
        try:
            for index in range(workers):
                self._workers.append(_start_worker(plan, first_batch + index, workers, f"feed-{index}"))
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[FedBatch]:
        return self

    def __next__(self) -> FedBatch:
        with self._taking:
            if self._is_closed:
                raise StopIteration
            index = self._next
            self._next += 1
            if self._maker is not None:
                return self._maker.batch(index)
            worker = self._workers[(index - self._first) % len(self._workers)]
            made = worker.take()
        if not isinstance(made, _Failure):
            return made
        if self._is_closed:
            raise StopIteration
        self.close()
        raise FeedError(f"making batch {index} failed in a worker process: {made.reason}")

    def close(self) -> None:
        """End the workers; batches that wait are dropped. May be called again."""
        self._is_closed = True
        for worker in self._workers:
            worker.process.kill()
        # Whoever is taking a batch sees its pipe end now, and lets go of it.
        with self._taking:
            for worker in self._workers:
                worker.process.join(_PATIENCE_S)
                worker.pipe.close()
            self._workers = []

    def __enter__(self) -> ExampleFeed:
        return self

    def __exit__(
        self, error: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class _Failure:
    reason: str


@dataclass(frozen=True)
class _Worker:
    process: BaseProcess
    pipe: Connection
    """Where its batches come out."""

    def take(self) -> FedBatch | _Failure:
        """Its next batch. A worker that ended is a failure, even in the middle of a message."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(_PATIENCE_S)
            return _Failure(f"it ended with exit code {self.process.exitcode} and said nothing")


def _start_worker(plan: FeedPlan, first: int, step: int, name: str) -> _Worker:
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_run_worker, args=(plan, first, step, sending), name=name, daemon=True)
    process.start()
    sending.close()
    return _Worker(process, receiving)


def _run_worker(plan: FeedPlan, first: int, step: int, sending: Connection) -> None:
    """In a process of its own: sends every `step`-th batch from `first` on, until nobody is there to take them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that owns the feed decides when to stop
    ready: queue.Queue[FedBatch | _Failure] = queue.Queue(_BATCHES_AHEAD)
    threading.Thread(target=_work, args=(plan, first, step, ready), name="make", daemon=True).start()
    with contextlib.suppress(BrokenPipeError):
        while True:
            made = ready.get()
            sending.send(made)
            if isinstance(made, _Failure):
                return


def _work(plan: FeedPlan, first: int, step: int, ready: queue.Queue[FedBatch | _Failure]) -> None:
    """Keeps a few batches ready; ends with its process."""
    try:
        maker = BatchMaker(plan)
        for index in count(first, step):
            ready.put(maker.batch(index))
    except Exception:
        ready.put(_Failure(f"\n{traceback.format_exc()}"))
