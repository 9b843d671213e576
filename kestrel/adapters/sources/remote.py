"""What every source that downloads has in common: the disk cache, one download per adapter, and a short memory of ids
that nobody knows."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

from kestrel.adapters.flights import Flights
from kestrel.adapters.ids import AdapterId
from kestrel.adapters.sources.cache_folder import PartialFile
from kestrel.adapters.sources.disk_cache import AdapterDiskCache, recognised_suffix
from kestrel.adapters.sources.downloads import MAX_DOWNLOADS_AT_ONCE, Downloader, DownloadLimits
from kestrel.adapters.sources.source import AdapterCopy, AdapterListing
from kestrel.errors import AdapterNotFound, AdapterSourceError, AdapterSourceTimeout
from kestrel.threads import Threads

logger = logging.getLogger("kestrel.adapters")

UNKNOWN_FOR_S = 5.0
MAX_UNKNOWN = 1024
MAX_KNOWN = 4096
TOUCHED_EVERY_S = 60.0
_FILE_THREADS = 4

Download = Callable[[AdapterId, PartialFile], Awaitable[str]]
"""Writes an adapter's file and gives its SHA-256."""


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
        self._copies: OrderedDict[AdapterId, AdapterCopy] = OrderedDict()
        self._touched: dict[AdapterId, float] = {}
        self._unknown: OrderedDict[AdapterId, tuple[float, AdapterNotFound]] = OrderedDict()
        self._lookups: Flights[AdapterCopy | None] = Flights()
        self._downloads: Flights[AdapterCopy] = Flights()
        self._threads = Threads("adapter-cache", _FILE_THREADS)
        self._turns = asyncio.Semaphore(MAX_DOWNLOADS_AT_ONCE)

    async def stored(self, adapter_id: AdapterId) -> AdapterCopy | None:
        """What is on disk. It never waits for a download."""
        copy = self._copies.get(adapter_id)
        if copy is not None and copy.is_current:
            self._touch(adapter_id)
            return copy
        if self._unknown_error(adapter_id) is not None:
            return None
        return await self._lookups.join(str(adapter_id), lambda: self._find(adapter_id))

    async def fetch(self, adapter_id: AdapterId) -> AdapterCopy:
        copy = await self.stored(adapter_id)
        if copy is not None:
            return copy
        if (error := self._unknown_error(adapter_id)) is not None:
            raise type(error)(str(error))
        return await self._downloads.join(str(adapter_id), lambda: self._obtain(adapter_id))

    async def list(self) -> Sequence[AdapterListing]:
        return await self._threads.run(self._cache.list, self._title)

    async def close(self) -> None:
        await asyncio.gather(self._lookups.close(), self._downloads.close())
        self._threads.close()
        self._downloader.threads.close()

    async def _find(self, adapter_id: AdapterId) -> AdapterCopy | None:
        try:
            copy = await self._threads.run(self._cache.find, str(adapter_id))
        except OSError as error:
            raise self._not_stored(adapter_id, error) from error
        if copy is not None:
            self._remember(adapter_id, copy)
        return copy

    async def _obtain(self, adapter_id: AdapterId) -> AdapterCopy:
        try:
            async with self._turns:
                copy = await self._find(adapter_id)  # somebody else may have brought it while this one waited
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
            raise self._not_stored(adapter_id, error) from error
        self._remember(adapter_id, copy)
        return copy

    async def _downloaded(self, adapter_id: AdapterId) -> AdapterCopy:
        partial, threads = self._cache.partial_file(), self._downloader.threads
        try:
            digest = await self._download(adapter_id, partial)
            suffix = await threads.run(recognised_suffix, partial.path)
            if suffix is None:
                raise self._downloader.failure(str(adapter_id), "sent something that is no complete adapter file")
            return await threads.run(self._cache.keep, str(adapter_id), partial.path, digest, suffix)
        finally:
            await threads.run(partial.discard)

    def _not_stored(self, adapter_id: AdapterId, error: OSError) -> AdapterSourceError:
        return AdapterSourceError(
            f"adapter '{adapter_id}': the download could not be stored ({error.strerror}); check adapter_cache_dir"
        )

    def _remember(self, adapter_id: AdapterId, copy: AdapterCopy) -> None:
        self._copies[adapter_id] = copy
        self._copies.move_to_end(adapter_id)
        self._touched[adapter_id] = time.monotonic()
        while len(self._copies) > MAX_KNOWN:
            forgotten, _ = self._copies.popitem(last=False)
            self._touched.pop(forgotten, None)

    def _touch(self, adapter_id: AdapterId) -> None:
        """Tells all processes now and then that it is in use."""
        now_s = time.monotonic()
        if now_s - self._touched[adapter_id] > TOUCHED_EVERY_S:
            self._touched[adapter_id] = now_s
            self._cache.touch(str(adapter_id))

    def _remember_unknown(self, adapter_id: AdapterId, error: AdapterNotFound) -> None:
        self._unknown[adapter_id] = (time.monotonic() + UNKNOWN_FOR_S, error)
        while len(self._unknown) > MAX_UNKNOWN:
            self._unknown.popitem(last=False)

    def _unknown_error(self, adapter_id: AdapterId) -> AdapterNotFound | None:
        """Ids that nobody knew a moment ago are not asked for again and again."""
        if adapter_id not in self._unknown:
            return None
        until_s, error = self._unknown[adapter_id]
        if time.monotonic() < until_s:
            return error
        del self._unknown[adapter_id]
        return None
