"""Batches of scenes and their packed tasks, made ahead by worker processes.

Batch k depends on the plan and k alone: worker processes make every n-th batch each, and the feed takes from them in
turn. So the order is the same for any number of workers, and a run can go on where another stopped.
"""

from __future__ import annotations

import multiprocessing
import queue
import signal
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from random import Random
from types import TracebackType
from typing import TypeAlias

import numpy as np

from kestrel.errors import ConfigError, KestrelError
from kestrel.skills import default_registry
from kestrel.train.courses import EVERYTHING, Course
from kestrel.train.packing import IMAGE_POSITIONS, PackedTasks, pack
from kestrel.train.scenes.difficulty import FIRST_HELD_OUT_SEED
from kestrel.train.scenes.placement import sample_batch, scene_at
from kestrel.train.scenes.truth import SceneBatch
from kestrel.train.tasks.example import TaskEncoder
from kestrel.train.tasks.mix import sample_tasks
from kestrel.train.tasks.prompt_format import PromptFormat
from kestrel.train.tasks.world import OutlineBook, task_world

_BATCHES_AHEAD = 4
_POLL_S = 0.5
_PATIENCE_S = 5.0

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
        return scenes, pack(encoded, plan.length, self._profile.ids, plan.image_positions)


class ExampleFeed:
    """Endless batches in order. Close it, or use it in a `with` block; without workers batches are made on demand."""

    def __init__(self, plan: FeedPlan, workers: int, first_batch: int = 0) -> None:
        if workers < 0:
            raise ConfigError("workers", f"must be 0 or more (got {workers})")
        self._next = first_batch
        self._maker = BatchMaker(plan) if workers == 0 else None
        context = multiprocessing.get_context("spawn")
        self._stop: Event = context.Event()
        self._queues: list[Queue[FedBatch | _Failure]] = [context.Queue(_BATCHES_AHEAD) for _ in range(workers)]
        self._first = first_batch
        self._processes: list[BaseProcess] = [
            context.Process(
                target=_work, args=(plan, first_batch + i, workers, batches, self._stop), name=f"feed-{i}", daemon=True
            )
            for i, batches in enumerate(self._queues)
        ]
        for process in self._processes:
            process.start()

    def __iter__(self) -> Iterator[FedBatch]:
        return self

    def __next__(self) -> FedBatch:
        if self._stop.is_set():
            raise StopIteration
        index = self._next
        self._next += 1
        if self._maker is not None:
            return self._maker.batch(index)
        made = self._take((index - self._first) % len(self._queues))
        if isinstance(made, _Failure):
            self.close()
            raise FeedError(f"making batch {index} failed in a worker process:\n{made.traceback}")
        return made

    def close(self) -> None:
        """End the workers; batches that wait are dropped. May be called again."""
        self._stop.set()
        for process, batches in zip(self._processes, self._queues, strict=True):
            _drain(batches)
            process.join(_PATIENCE_S)
            if process.is_alive():
                process.terminate()
                process.join()
            batches.close()
        self._processes, self._queues = [], []

    def __enter__(self) -> ExampleFeed:
        return self

    def __exit__(
        self, error: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self, worker: int) -> FedBatch | _Failure:
        process = self._processes[worker]
        while True:
            is_over = not process.is_alive()
            try:
                return self._queues[worker].get(timeout=_POLL_S)
            except queue.Empty:
                if is_over:
                    code = process.exitcode
                    self.close()
                    raise FeedError(f"worker process {worker} ended with exit code {code} and said nothing") from None


@dataclass(frozen=True)
class _Failure:
    traceback: str


def _work(plan: FeedPlan, first: int, step: int, batches: Queue[FedBatch | _Failure], stop: Event) -> None:
    """A worker: every `step`-th batch from `first` on, until told to stop or left alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that owns the feed decides when to stop
    try:
        maker = BatchMaker(plan)
        for index in count(first, step):
            if not _put(batches, maker.batch(index), stop):
                batches.cancel_join_thread()
                return
    except Exception:
        _put(batches, _Failure(traceback.format_exc()), stop)


def _put(batches: Queue[FedBatch | _Failure], made: FedBatch | _Failure, stop: Event) -> bool:
    """Whether it was handed over and the feed is still there."""
    parent = multiprocessing.parent_process()
    while not stop.is_set() and (parent is None or parent.is_alive()):
        try:
            batches.put(made, timeout=_POLL_S)
            return True
        except queue.Full:
            continue
    return False


def _drain(batches: Queue[FedBatch | _Failure]) -> None:
    while True:
        try:
            batches.get_nowait()
        except queue.Empty:
            return
