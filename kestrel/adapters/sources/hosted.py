"""Fine-tunes of the hosted service: an id and a key give a presigned URL, and that gives the file.

The key goes to the service alone, never to the host of the presigned URL.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import httpx

from kestrel.adapters.ids import AdapterId
from kestrel.adapters.sources.cache_folder import DEFAULT_MAX_BYTES, PartialFile
from kestrel.adapters.sources.disk_cache import AdapterDiskCache
from kestrel.adapters.sources.downloads import Downloader, DownloadLimits, parsed_url
from kestrel.adapters.sources.remote import RemoteCopies
from kestrel.adapters.sources.source import AdapterCopy, AdapterListing
from kestrel.errors import AdapterNotFound, ConfigError

BASE_URL = "https://api.moondream.ai"
KEY_HEADER = "X-Moondream-Auth"


class HostedSource:
    downloads = True
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
            raise ConfigError("api_key", "must be printable ASCII without blanks; copy MOONDREAM_API_KEY again")
        if parsed_url(base_url) is None:
            raise ConfigError("base_url", "must be an https URL (http only for the own machine)")
        self._base_url = base_url.rstrip("/")
        self._headers = {KEY_HEADER: api_key}
        limits = limits or DownloadLimits()
        self._downloader = Downloader(self.title, limits, "MOONDREAM_API_KEY")
        cache = AdapterDiskCache(cache_folder, f"hosted {self._base_url}", max_cache_bytes)
        self._copies = RemoteCopies(self.title, self._downloader, limits, cache, self._download)

    async def stored(self, adapter_id: AdapterId) -> AdapterCopy | None:
        return await self._copies.stored(adapter_id)

    async def fetch(self, adapter_id: AdapterId) -> AdapterCopy:
        if adapter_id.step is None:
            raise AdapterNotFound(f"adapter '{adapter_id}': {self.title} needs a step; write finetune_id@step")
        return await self._copies.fetch(adapter_id)

    async def list(self) -> Sequence[AdapterListing]:
        return await self._copies.list()

    async def close(self) -> None:
        await self._copies.close()

    async def _download(self, adapter_id: AdapterId, target: PartialFile) -> str:
        name, step = quote(adapter_id.name, safe=""), quote(adapter_id.step or "", safe="")
        address = httpx.URL(f"{self._base_url}/v1/tuning/finetunes/{name}/checkpoints/{step}/download")
        answer = await self._downloader.json(address, self._headers, str(adapter_id))
        if not isinstance(answer, dict) or "url" not in answer:
            raise self._downloader.failure(str(adapter_id), "answered without the address of the file")
        presigned = self._downloader.checked_url(answer["url"], address, str(adapter_id))
        return await self._downloader.file(presigned, target, str(adapter_id))
