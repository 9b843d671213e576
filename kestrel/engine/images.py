"""Decoding pictures in a pool, so that neither the event loop nor the accelerator's thread waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kestrel.config import RuntimeConfig
from kestrel.images.decode import decode_image
from kestrel.images.limits import ImageLimits
from kestrel.images.rgb import RgbImage


class ImageDecoder:
    def __init__(self, config: RuntimeConfig) -> None:
        self._limits = ImageLimits(
            max_pixels=config.max_image_pixels,
            max_bytes=config.max_image_bytes,
            honour_exif=config.honour_exif_orientation,
        )
        self._pool = ThreadPoolExecutor(config.image_threads, thread_name_prefix="kestrel-image")

    async def decode(self, sources: Sequence[Any]) -> list[RgbImage]:
        loop = asyncio.get_running_loop()
        return list(
            await asyncio.gather(
                *(loop.run_in_executor(self._pool, decode_image, source, self._limits) for source in sources)
            )
        )

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
