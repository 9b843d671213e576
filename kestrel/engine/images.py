"""Decoding pictures in a pool, so that neither the event loop nor the accelerator's thread waits for it."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kestrel.config import RuntimeConfig
from kestrel.errors import QueueFull
from kestrel.images.decode import decode_image, known_images
from kestrel.images.limits import ImageLimits
from kestrel.images.recent import RecentPictures
from kestrel.images.rgb import RgbImage

T = TypeVar("T")


class PicturePool:
    """Decodes pictures, and keeps account of the memory that pictures of unanswered requests take."""

    def __init__(self, config: RuntimeConfig) -> None:
        self._limits = ImageLimits(
            max_pixels=config.max_image_pixels,
            max_bytes=config.max_image_bytes,
            honour_exif=config.honour_exif_orientation,
        )
        self._max_pending_bytes = config.max_pending_image_bytes
        self._recent = RecentPictures(config.recent_image_bytes)
        self._held: dict[str, list[RgbImage]] = {}
        self._by_digest: dict[str, RgbImage] = {}
        self._num_holders: Counter[str] = Counter()
        self._num_bytes = 0
        num_threads = config.image_threads or min(8, max(2, (os.cpu_count() or 1) // 2))
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="kestrel-image")

    async def decode(self, request_id: str, sources: Sequence[Any]) -> list[RgbImage]:
        """The pictures of a request; they count until `release`. Equal ones of several requests are one in memory."""
        decoded = await self._decoded(sources)
        fresh = {image.digest: image for image in decoded if image.digest not in self._by_digest}
        num_bytes = sum(image.pixels.nbytes for image in fresh.values())
        if fresh and self._num_bytes + num_bytes > self._max_pending_bytes:
            raise QueueFull(
                "decoded pictures of unanswered requests fill max_pending_image_bytes; retry later or raise it"
            )
        self._by_digest |= fresh
        self._num_bytes += num_bytes
        self._num_holders.update(image.digest for image in decoded)
        self._held[request_id] = [self._by_digest[image.digest] for image in decoded]
        return self._held[request_id]

    async def _decoded(self, sources: Sequence[Any]) -> list[RgbImage]:
        known = known_images(sources, self._limits, self._recent)
        if known is not None:
            return known
        calls = [self.run(decode_image, source, self._limits, self._recent) for source in sources]
        return await asyncio.gather(*calls)

    def release(self, request_id: str) -> None:
        for image in self._held.pop(request_id, ()):
            self._num_holders[image.digest] -= 1
            if not self._num_holders[image.digest]:
                del self._num_holders[image.digest], self._by_digest[image.digest]
                self._num_bytes -= image.pixels.nbytes

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Something slow, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    def close(self) -> None:
        """Let what was begun end by itself; its callers find the engine stopped."""
        self._pool.shutdown(wait=False)
