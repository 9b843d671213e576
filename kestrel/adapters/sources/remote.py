"""Sources that download: the hosted service, and any web server by a URL template."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from string import Formatter
from urllib.parse import quote

import httpx

from kestrel.adapters.adapter import AdapterId
from kestrel.adapters.single_flight import SingleFlight
from kestrel.adapters.sources.disk_cache import DEFAULT_MAX_BYTES, AdapterDiskCache, PartialFile, recognised_suffix
from kestrel.adapters.sources.downloads import MAX_DOWNLOADS_AT_ONCE, Downloader, DownloadLimits, parsed_url
from kestrel.adapters.sources.source import AdapterCopy, AdapterListing
from kestrel.errors import AdapterNotFound, AdapterSourceError, AdapterSourceTimeout, ConfigError
from kestrel.threads import Threads

logger = logging.getLogger("kestrel.adapters")

UNKNOWN_FOR_S = 5.0
MAX_UNKNOWN = 1024
MAX_KNOWN = 4096
TOUCHED_EVERY_S = 60.0
_FILE_THREADS = 4


class RemoteSource(ABC):
    """Adapters are downloaded when they are first asked for, each once, and what was downloaded is taken as final. Ids
    that nobody knows are remembered for a moment."""

    title: str
    downloads = True

    def __init__(
        self,
        namespace: str,
        cache_folder: Path,
        max_cache_bytes: int = DEFAULT_MAX_BYTES,
        limits: DownloadLimits | None = None,
        *,
        when_denied: str,
    ) -> None:
        """`namespace` tells sources with one cache folder apart; `when_denied` is what an operator should check."""
        self._limits = limits or DownloadLimits()
        self._downloader = Downloader(self.title, self._limits, when_denied)
        self._cache = AdapterDiskCache(cache_folder, namespace, max_cache_bytes)
        self._copies: OrderedDict[AdapterId, AdapterCopy] = OrderedDict()
        self._touched: dict[AdapterId, float] = {}
        self._unknown: OrderedDict[AdapterId, tuple[float, AdapterNotFound]] = OrderedDict()
        self._lookups: SingleFlight[AdapterCopy | None] = SingleFlight()
        self._downloads: SingleFlight[AdapterCopy] = SingleFlight()
        self._threads = Threads("adapter-cache", _FILE_THREADS)
        self._turns = asyncio.Semaphore(MAX_DOWNLOADS_AT_ONCE)

    @abstractmethod
    async def _download(self, adapter_id: AdapterId, target: PartialFile) -> str:
        """Writes an adapter's file and gives its SHA-256."""

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
        return await self._threads.run(self._cache.list, self.title)

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
                f"adapter '{adapter_id}': {self.title} did not deliver within {self._limits.total_timeout_s:g} s"
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
                raise self._downloader.failure(str(adapter_id), "sent something that is not a complete adapter file")
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


BASE_URL = "https://api.moondream.ai"
KEY_HEADER = "X-Moondream-Auth"


class HostedSource(RemoteSource):
    """Fine-tunes of the hosted service: an id and a key give a presigned URL, and that gives the file.

    The key goes to the service alone, never to the host of the presigned URL.
    """

    title = "the hosted service"

    def __init__(
        self,
        api_key: str,
        cache_folder: Path,
        *,
        base_url: str = BASE_URL,
        max_cache_bytes: int = DEFAULT_MAX_BYTES,
        limits: DownloadLimits | None = None,
    ) -> None:
        if not api_key or not api_key.isascii() or not api_key.isprintable() or " " in api_key:
            raise ConfigError("api_key", "must be printable ASCII without spaces; copy MOONDREAM_API_KEY again")
        if parsed_url(base_url) is None:
            raise ConfigError("base_url", "must be an https URL (http only for this machine)")
        self._base_url = base_url.rstrip("/")
        self._headers = {KEY_HEADER: api_key}
        super().__init__(
            f"hosted {self._base_url}", cache_folder, max_cache_bytes, limits, when_denied="MOONDREAM_API_KEY"
        )

    async def fetch(self, adapter_id: AdapterId) -> AdapterCopy:
        if adapter_id.step is None:
            raise AdapterNotFound(f"adapter '{adapter_id}': {self.title} needs a step; write finetune_id@step")
        return await super().fetch(adapter_id)

    async def _download(self, adapter_id: AdapterId, target: PartialFile) -> str:
        name, step = quote(adapter_id.name, safe=""), quote(adapter_id.step or "", safe="")
        address = httpx.URL(f"{self._base_url}/v1/tuning/finetunes/{name}/checkpoints/{step}/download")
        answer = await self._downloader.json(address, self._headers, str(adapter_id))
        if not isinstance(answer, dict) or "url" not in answer:
            raise self._downloader.failure(str(adapter_id), "answered without the address of the file")
        presigned = self._downloader.checked_url(answer["url"], address, str(adapter_id))
        return await self._downloader.file(presigned, target, str(adapter_id))


class UrlTemplateSource(RemoteSource):
    """Adapters on any web server: the id is filled into a URL.

    The template has `{id}`, or `{finetune_id}` and, for adapters with steps, `{step}`; RuntimeConfig checks it.
    """

    title = "the server of adapter_url_template"

    def __init__(
        self,
        template: str,
        cache_folder: Path,
        *,
        max_cache_bytes: int = DEFAULT_MAX_BYTES,
        limits: DownloadLimits | None = None,
    ) -> None:
        self._template = template
        self._placeholders = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
        if parsed_url(self._filled(AdapterId("name", "1"))) is None:
            raise ConfigError("adapter_url_template", "must be an https URL without a user (http only for loopback)")
        super().__init__(
            f"template {template}", cache_folder, max_cache_bytes, limits, when_denied="adapter_url_template"
        )

    async def fetch(self, adapter_id: AdapterId) -> AdapterCopy:
        has_steps = "step" in self._placeholders
        if "id" not in self._placeholders and has_steps != (adapter_id.step is not None):
            kind = "with" if has_steps else "without"
            raise AdapterNotFound(f"adapter '{adapter_id}': {self.title} has ids {kind} a step only")
        return await super().fetch(adapter_id)

    async def _download(self, adapter_id: AdapterId, target: PartialFile) -> str:
        return await self._downloader.file(httpx.URL(self._filled(adapter_id)), target, str(adapter_id))

    def _filled(self, adapter_id: AdapterId) -> str:
        values = {"id": str(adapter_id), "finetune_id": adapter_id.name, "step": adapter_id.step or ""}
        return self._template.format(**{name: quote(value, safe="") for name, value in values.items()})
