from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import islice

import numpy as np
import pytest

from kestrel.errors import ConfigError
from kestrel.train.feed import BatchMaker, ExampleFeed, FedBatch, FeedError, FeedPlan
from kestrel.train.tasks.mix import BEGINNING
from kestrel.train.tasks.view import PathBook

from .bad_outlines import BrokenOutlines, DeadlyOutlines
from .made_scenes import task_format

NO_OUTLINES = PathBook((), ())


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


def _plan() -> FeedPlan:
    return FeedPlan(task_format(), NO_OUTLINES, start_seed=1000, batch_size=3, courses=(BEGINNING,))


def _same(a: FedBatch, b: FedBatch) -> bool:
    def values(batch: FedBatch) -> list[object]:
        return [getattr(part, f.name) for part in batch for f in fields(part)]

    return all(np.array_equal(x, y) for x, y in zip(values(a), values(b), strict=True))  # pyright: ignore[reportArgumentType]


@pytest.mark.exhaustive
def test_batches_come_in_order_whatever_the_number_of_workers() -> None:
    maker = BatchMaker(_plan())
    with ExampleFeed(_plan(), workers=2, first_batch=4) as feed:
        made = list(islice(feed, 7))
    for index, batch in enumerate(made, start=4):
        assert batch[0].seeds.tolist() == list(range(1000 + 3 * index, 1003 + 3 * index))
        assert _same(batch, maker.batch(index))


def test_without_workers_batches_are_made_here() -> None:
    with ExampleFeed(_plan(), workers=0) as feed:
        made = list(islice(feed, 2))
    assert _same(made[1], BatchMaker(_plan()).batch(1))
    assert not _same(made[0], made[1])


def test_a_scene_has_the_same_tasks_in_any_batch() -> None:
    first = BatchMaker(_plan()).batch(1)[1]
    second = BatchMaker(replace(_plan(), batch_size=1)).batch(4)[1]
    assert np.array_equal(first.input_id[1], second.input_id[0])
    assert np.array_equal(first.label_coord[1], second.label_coord[0])


def test_sizes_change_from_batch_to_batch() -> None:
    maker = BatchMaker(replace(_plan(), sizes=((378, 378), (400, 600))))
    sizes = {(scenes.height, scenes.width) for scenes, _ in map(maker.batch, range(12))}
    assert sizes == {(378, 378), (400, 600)}


def test_an_error_in_a_worker_comes_out_with_its_traceback() -> None:
    plan = replace(_plan(), outlines=BrokenOutlines(), batch_size=20)
    with ExampleFeed(plan, workers=1) as feed, pytest.raises(FeedError, match=r"(?s)_work.*is broken"):
        list(islice(feed, 3))


def test_a_worker_that_dies_is_reported() -> None:
    plan = replace(_plan(), outlines=DeadlyOutlines(), batch_size=20)
    with ExampleFeed(plan, workers=1) as feed, pytest.raises(FeedError, match="exit code 7"):
        list(islice(feed, 3))


def test_a_closed_feed_ends_and_may_be_closed_again() -> None:
    feed = ExampleFeed(_plan(), workers=1)
    next(feed)
    feed.close()
    feed.close()
    assert list(feed) == []


@pytest.mark.parametrize("field", ["batch_size", "tasks_per_scene", "length", "image_positions"])
def test_a_plan_of_nothing_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        replace(_plan(), **{field: 0})  # pyright: ignore[reportArgumentType]


def _big_plan() -> FeedPlan:
    """Batches of more than a megabyte: far more than a pipe holds."""
    return replace(_plan(), batch_size=100, length=400)


def _kill_a_worker_in_the_middle_of_a_message(feed: ExampleFeed) -> None:
    assert feed._workers[0].pipe.poll(60), "no message was begun"
    (process,) = multiprocessing.active_children()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def _close(feed: ExampleFeed) -> list[int | None]:
    """The exit codes of its workers, which end in the middle of what they do."""
    workers = multiprocessing.active_children()
    closing = threading.Thread(target=feed.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive(), "it waits for something that never comes"
    return [worker.exitcode for worker in workers]


def test_a_feed_is_closed_after_a_worker_was_killed_in_the_middle_of_a_message() -> None:
    feed = ExampleFeed(_big_plan(), workers=1)
    next(feed)
    _kill_a_worker_in_the_middle_of_a_message(feed)
    assert _close(feed) == []


def test_a_cut_message_is_reported_as_the_end_of_its_worker() -> None:
    with ExampleFeed(_big_plan(), workers=1) as feed:
        _kill_a_worker_in_the_middle_of_a_message(feed)
        with pytest.raises(FeedError, match="exit code -9"):
            next(feed)


@pytest.mark.exhaustive
def test_closing_does_not_wait_for_workers_that_are_busy_or_starting() -> None:
    starting = ExampleFeed(_big_plan(), workers=2)
    assert _close(starting) == [-signal.SIGKILL] * 2
    busy = ExampleFeed(_plan(), workers=1)
    next(busy)
    assert _close(busy) == [-signal.SIGKILL]


def test_closing_ends_a_thread_that_waits_for_a_batch() -> None:
    feed = ExampleFeed(replace(_plan(), batch_size=10_000), workers=1)
    taken: list[FedBatch] = []
    taking = threading.Thread(target=lambda: taken.extend(feed), daemon=True)
    taking.start()
    time.sleep(0.2)
    assert taking.is_alive()
    assert _close(feed) == [-signal.SIGKILL]
    taking.join(60)
    assert not taking.is_alive()
    assert taken == []
