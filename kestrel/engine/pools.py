"""Slow work for requests in thread pools, so that neither the event loop nor the worker waits for it.

Pictures: small ones never wait behind large ones, which have threads of their own and rest half of the time while a
model computes on the same processor. What decoding takes is reckoned from a picture's header and counted before it
begins. What is kept of a picture afterwards is what the model needs of it.

Answer formats: a few threads compile, each behind a trial that bounds its time. One more serves the formats that are
compiled already, so that these never wait behind one that is not.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from kestrel.config import RuntimeConfig
from kestrel.errors import EngineStopped, QueueFull, RequestError
from kestrel.images.decode import OpenedImage, RecentPictures, decode_opened, find_or_open, known_images
from kestrel.images.encoded import ImageLimits
from kestrel.images.picture import Picture, PictureForm
from kestrel.skills.base import ConstraintSource
from kestrel.threads import Pace, Threads

T = TypeVar("T")
TOO_LATE = "the engine was shut down before the request was read"


class WorkRoom:
    """The memory that pictures may take while they are decoded and resized, shared by threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._changed = threading.Condition()

    def require_possible(self, opened: OpenedImage) -> None:
        if opened.work_bytes > self._max_bytes:
            raise RequestError(
                "image",
                f"decoding {opened.width}x{opened.height} pixels takes up to {opened.work_bytes} bytes, the limit is "
                f"{self._max_bytes}; send a smaller picture or raise image_work_bytes",
            )

    def try_take(self, num_bytes: int) -> bool:
        with self._changed:
            has_room = self._num_bytes + num_bytes <= self._max_bytes
            self._num_bytes += num_bytes if has_room else 0
            return has_room

    @contextmanager
    def waited_for(self, num_bytes: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._num_bytes + num_bytes <= self._max_bytes)
            self._num_bytes += num_bytes
        try:
            yield
        finally:
            self.give_back(num_bytes)

    def give_back(self, num_bytes: int) -> None:
        with self._changed:
            self._num_bytes -= num_bytes
            self._changed.notify_all()


class PicturePool:
    """Decodes pictures, and keeps account of the memory that pictures of unanswered requests take."""

    def __init__(
        self,
        config: RuntimeConfig,
        form: PictureForm | None = None,
        is_computing: Callable[[], bool] = lambda: False,
    ) -> None:
        """`form`: what the model takes of a picture; all pixels where it is not given. While `is_computing`, the model
        needs the processor, and large pictures take half of one core's time."""
        self._limits = ImageLimits(
            max_pixels=config.max_image_pixels,
            max_bytes=config.max_image_bytes,
            honour_exif=config.honour_exif_orientation,
        )
        self._form = form
        self._is_computing = is_computing
        self._max_pending_bytes = config.max_pending_image_bytes
        self._recent = RecentPictures(config.recent_image_bytes)
        self._room = WorkRoom(config.image_work_bytes)
        self._held: dict[str, list[Picture]] = {}
        self._by_digest: dict[str, Picture] = {}
        self._num_holders: Counter[str] = Counter()
        self._num_bytes = 0
        num_threads = config.image_threads or min(8, max(2, (os.cpu_count() or 1) // 2))
        self._threads = Threads("image", num_threads)
        self._large = Threads("large-image", max(1, num_threads // 4))
        self._is_closed = False

    async def decode(
        self,
        request_id: str,
        sources: Sequence[Any],
        require_wanted: Callable[[], None] = lambda: None,
        max_crops: int | None = None,
    ) -> list[Picture]:
        """The pictures of a request; they count until `release`. Equal ones of several requests are one in memory.

        Large ones may wait for long: before one is begun, `require_wanted` may raise, on another thread. `max_crops`
        bounds the local crops of each.
        """
        limits = self._limits if max_crops is None else self._limits_with(max_crops, len(sources))
        return self.hold(request_id, await self._decoded(sources, limits, require_wanted))

    def _limits_with(self, max_crops: int, num_pictures: int) -> ImageLimits:
        if not num_pictures:
            raise RequestError("max_crops", "bounds the crops of pictures, and there is none; leave it out")
        own = max_crops if self._form is None else self._form.tiling.max_crops
        if max_crops > own:
            raise RequestError("max_crops", f"must be at most {own}, as many as this model makes (got {max_crops})")
        return replace(self._limits, max_crops=max_crops if max_crops < own or self._form is None else None)

    def hold(self, request_id: str, decoded: Sequence[Picture]) -> list[Picture]:
        """Count decoded pictures for a request, until `release`."""
        fresh = {image.digest: image for image in decoded if image.digest not in self._by_digest}
        num_bytes = sum(image.num_bytes for image in fresh.values())
        if fresh and self._num_bytes + num_bytes > self._max_pending_bytes:
            raise QueueFull("pictures of unanswered requests fill max_pending_image_bytes; retry later or raise it")
        self._by_digest |= fresh
        self._num_bytes += num_bytes
        self._num_holders.update(image.digest for image in decoded)
        self._held[request_id] = [self._by_digest[image.digest] for image in decoded]
        return self._held[request_id]

    async def _decoded(
        self, sources: Sequence[Any], limits: ImageLimits, require_wanted: Callable[[], None]
    ) -> list[Picture]:
        known = known_images(sources, limits, self._recent)
        if known is not None:
            return known
        return await asyncio.gather(*(self._decoded_alone(source, limits, require_wanted) for source in sources))

    async def _decoded_alone(self, source: Any, limits: ImageLimits, require_wanted: Callable[[], None]) -> Picture:
        found = await self.run(self._decode_if_small, source, limits)
        if not isinstance(found, OpenedImage):
            return found
        return await self._run(self._large, self._decode_in_turn, found, require_wanted)

    def _decode_if_small(self, source: Any, limits: ImageLimits) -> Picture | OpenedImage:
        """The picture, unless it is large or there is no room for it now."""
        found = find_or_open(source, limits, self._recent)
        if not isinstance(found, OpenedImage):
            return found
        self._room.require_possible(found)
        if found.is_large or not self._room.try_take(found.work_bytes):
            return found
        try:
            return decode_opened(found, self._recent, self._form)
        finally:
            self._room.give_back(found.work_bytes)

    def _decode_in_turn(self, opened: OpenedImage, require_wanted: Callable[[], None]) -> Picture:
        with self._room.waited_for(opened.work_bytes):
            require_wanted()
            return decode_opened(opened, self._recent, self._form, Pace(self._is_computing).rest)

    def held(self, request_id: str) -> list[Picture]:
        return self._held[request_id]

    def release(self, request_id: str) -> None:
        for image in self._held.pop(request_id, ()):
            self._num_holders[image.digest] -= 1
            if not self._num_holders[image.digest]:
                del self._num_holders[image.digest], self._by_digest[image.digest]
                self._num_bytes -= image.num_bytes

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Something slow, off the event loop."""
        return await self._run(self._threads, function, *arguments)

    async def _run(self, threads: Threads, function: Callable[..., T], *arguments: Any) -> T:
        if self._is_closed:
            raise EngineStopped(TOO_LATE)
        try:
            return await threads.run(function, *arguments)
        except asyncio.CancelledError:
            if self._is_closed:  # what waits for a thread then is dropped
                raise EngineStopped(TOO_LATE) from None
            raise

    def close(self) -> None:
        """Let what was begun end by itself; its callers find the engine stopped."""
        self._is_closed = True
        self._threads.close()
        self._large.close()


# ---------------------------------------------------------------------- answer formats

NUM_COMPILING = 2
"""A format that takes all of its time holds up no other as long as it is alone."""
MAX_WAITING = 64
"""Requests with formats that are not compiled yet. What they wait is not counted against what their own may take."""
STACK_BYTES = 64 * 2**20
"""The compiler calls itself once for every level of a schema; a thread's usual stack holds some hundred of them."""


class FormatThreads:
    """Where requests with an answer format are laid out."""

    def __init__(self, constraints: ConstraintSource | None) -> None:
        self._constraints = constraints
        self._compiling = DeepThreads("compile", NUM_COMPILING)
        self._starting = DeepThreads("formats", 1)
        self._num_waiting = 0

    async def prepare(self) -> None:
        """What every format needs, so that the first one finds it ready."""
        if self._constraints is not None:
            await self._starting.run(self._constraints.prepare)

    async def run(self, is_kept: bool, function: Callable[..., T], *arguments: Any) -> T:
        """`is_kept`: the format is compiled already. Should it be given up meanwhile, this compiles it as well."""
        if is_kept:
            return await self._starting.run(function, *arguments)
        if self._num_waiting >= MAX_WAITING:
            raise QueueFull(f"{self._num_waiting} answer formats are waiting to be compiled; retry later")
        self._num_waiting += 1
        try:
            return await self._compiling.run(function, *arguments)
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        """Nothing that was begun holds up the end of the process: trials are killed."""
        self._compiling.close()
        self._starting.close()
        if self._constraints is not None:
            self._constraints.close()


class DeepThreads:
    """Threads with deep stacks, started on first use."""

    def __init__(self, name: str, number: int) -> None:
        self._name = name
        self._number = number
        self._pool: ThreadPoolExecutor | None = None

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """A cancelled caller leaves immediately; what was begun ends by itself."""
        if self._pool is None:
            self._pool = self._started()
        return await asyncio.wrap_future(self._pool.submit(function, *arguments))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _started(self) -> ThreadPoolExecutor:
        """Threads take the stack size that is set while they start, so all of them start here."""
        pool = ThreadPoolExecutor(self._number, thread_name_prefix=f"kestrel-{self._name}")
        all_started = threading.Barrier(self._number)
        before = threading.stack_size(STACK_BYTES)
        try:
            for _ in range(self._number):
                pool.submit(all_started.wait)
        finally:
            threading.stack_size(before)
        return pool
