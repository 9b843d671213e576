"""What every source that downloads has in common: the disk cache, one download per adapter, and a short memory of ids
that nobody knows."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from kestrel.adapters.flights import Flights
from kestrel.adapters.ids import AdapterId
from kestrel.adapters.sources.disk_cache import AdapterDiskCache, recognised_suffix
from kestrel.adapters.sources.downloads import Downloader, DownloadLimits
from kestrel.adapters.sources.source import AdapterCopy, AdapterListing
from kestrel.errors import AdapterNotFound, AdapterSourceError, AdapterSourceTimeout

logger = logging.getLogger("kestrel.adapters")

MAX_DOWNLOADS_AT_ONCE = 4
UNKNOWN_FOR_S = 5.0
MAX_UNKNOWN = 1024

Download = Callable[[AdapterId, Path], Awaitable[str]]
"""Writes an adapter's file to a path and gives its SHA-256."""


class RemoteCopies:
    """Copies of adapters that are downloaded when they are first asked for. What was downloaded is taken as final."""

    def __init__(
        self, title: str, downloader: Downloader, limits: DownloadLimits, cache: AdapterDiskCache, download: Download
    ) -> None:
        self._title = title
        self._downloader = downloader
        self._limits = limits
        self._cache = cache
        self._download = download
        self._copies: dict[AdapterId, AdapterCopy] = {}
        self._unknown: OrderedDict[AdapterId, tuple[float, AdapterNotFound]] = OrderedDict()
        self._flights: Flights[AdapterCopy] = Flights()
        self._turns = asyncio.Semaphore(MAX_DOWNLOADS_AT_ONCE)

    async def fetch(self, adapter_id: AdapterId) -> AdapterCopy:
        copy = self._copies.get(adapter_id)
        if copy is not None and copy.is_current:
            return copy
        self._refuse_unknown(adapter_id)
        return await self._flights.join(str(adapter_id), lambda: self._obtain(adapter_id))

    async def list(self) -> Sequence[AdapterListing]:
        return await asyncio.to_thread(self._cache.list, self._title)

    async def close(self) -> None:
        await self._flights.close()

    async def _obtain(self, adapter_id: AdapterId) -> AdapterCopy:
        try:
            async with self._turns:
                copy = await asyncio.to_thread(self._cache.find, str(adapter_id))
                copy = copy or await asyncio.wait_for(self._downloaded(adapter_id), self._limits.total_timeout_s)
        except AdapterNotFound as error:
            self._remember_unknown(adapter_id, error)
            raise
        except AdapterSourceError as error:
            logger.warning("%s", error)
            raise
        except asyncio.TimeoutError:
            raise AdapterSourceTimeout(
                f"adapter '{adapter_id}': {self._title} did not deliver within {self._limits.total_timeout_s:g} s"
            ) from None
        except OSError as error:
            raise AdapterSourceError(
                f"adapter '{adapter_id}': the download could not be stored ({error.strerror}); check adapter_cache_dir"
            ) from error
        self._copies[adapter_id] = copy
        return copy

    async def _downloaded(self, adapter_id: AdapterId) -> AdapterCopy:
        with self._cache.partial_file() as partial:
            digest = await self._download(adapter_id, partial)
            suffix = await asyncio.to_thread(recognised_suffix, partial)
            if suffix is None:
                raise self._downloader.failure(str(adapter_id), "sent something that is no complete adapter file")
            return await asyncio.to_thread(self._cache.keep, str(adapter_id), partial, digest, suffix)

    def _remember_unknown(self, adapter_id: AdapterId, error: AdapterNotFound) -> None:
        self._unknown[adapter_id] = (time.monotonic() + UNKNOWN_FOR_S, error)
        while len(self._unknown) > MAX_UNKNOWN:
            self._unknown.popitem(last=False)

    def _refuse_unknown(self, adapter_id: AdapterId) -> None:
        """Ids that nobody knew a moment ago are not asked for again and again."""
        if adapter_id not in self._unknown:
            return
        until_s, error = self._unknown[adapter_id]
        if time.monotonic() < until_s:
            raise type(error)(str(error))
        del self._unknown[adapter_id]
