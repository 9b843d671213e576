"""Decoded files that were asked for lately: many questions about one picture decode it once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeAlias

from kestrel.images.rgb import RgbImage
from kestrel.images.shrink import ShrunkImage

Picture: TypeAlias = RgbImage | ShrunkImage
"""As an engine keeps it: with all its pixels, or reduced to what the model needs."""


class RecentPictures:
    """For several threads. Whoever asks for a file that another thread is decoding waits for that."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._pictures: OrderedDict[str, Future[Picture]] = OrderedDict()
        self._num_bytes = 0

    def get(self, digest: str, decode: Callable[[], Picture]) -> Picture:
        """The picture with this digest; `decode` makes it. A failure is everyone's who waited, and is not kept."""
        own: Future[Picture] = Future()
        with self._lock:
            found = self._pictures.setdefault(digest, own)
            self._pictures.move_to_end(digest)
        if found is not own:
            return found.result()
        try:
            picture = decode()
        except BaseException as error:
            with self._lock:
                del self._pictures[digest]
            own.set_exception(error)
            raise
        with self._lock:
            self._make_room(digest, picture.num_bytes)
        own.set_result(picture)
        return picture

    def find(self, digest: str) -> Picture | None:
        """The picture with this digest if it is here by now; never waits."""
        with self._lock:
            found = self._pictures.get(digest)
            if found is None or not found.done():
                return None
            self._pictures.move_to_end(digest)
        return found.result()

    def _make_room(self, digest: str, num_bytes: int) -> None:
        """For a picture whose future is still open, so that nobody drives it out before it counts."""
        if num_bytes > self._max_bytes:
            del self._pictures[digest]
            return
        self._num_bytes += num_bytes
        for other in [other for other, future in self._pictures.items() if future.done()]:
            if self._num_bytes <= self._max_bytes:
                return
            self._num_bytes -= self._pictures.pop(other).result().num_bytes
