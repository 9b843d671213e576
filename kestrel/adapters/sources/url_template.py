"""Adapters on any web server: the id is filled into a URL."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from string import Formatter
from urllib.parse import quote

import httpx

from kestrel.adapters.ids import AdapterId
from kestrel.adapters.sources.cache_folder import DEFAULT_MAX_BYTES, PartialFile
from kestrel.adapters.sources.disk_cache import AdapterDiskCache
from kestrel.adapters.sources.downloads import Downloader, DownloadLimits, parsed_url
from kestrel.adapters.sources.remote import RemoteCopies
from kestrel.adapters.sources.source import AdapterCopy, AdapterListing
from kestrel.errors import AdapterNotFound, ConfigError


class UrlTemplateSource:
    """The template has `{id}`, or `{finetune_id}` and, for adapters with steps, `{step}`; RuntimeConfig checks it."""

    downloads = True
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
        limits = limits or DownloadLimits()
        self._downloader = Downloader(self.title, limits, "adapter_url_template")
        cache = AdapterDiskCache(cache_folder, f"template {template}", max_cache_bytes)
        self._copies = RemoteCopies(self.title, self._downloader, limits, cache, self._download)

    async def stored(self, adapter_id: AdapterId) -> AdapterCopy | None:
        return await self._copies.stored(adapter_id)

    async def fetch(self, adapter_id: AdapterId) -> AdapterCopy:
        has_steps = "step" in self._placeholders
        if "id" not in self._placeholders and has_steps != (adapter_id.step is not None):
            kind = "with" if has_steps else "without"
            raise AdapterNotFound(f"adapter '{adapter_id}': {self.title} has ids {kind} a step only")
        return await self._copies.fetch(adapter_id)

    async def list(self) -> Sequence[AdapterListing]:
        return await self._copies.list()

    async def close(self) -> None:
        await self._copies.close()

    async def _download(self, adapter_id: AdapterId, target: PartialFile) -> str:
        return await self._downloader.file(httpx.URL(self._filled(adapter_id)), target, str(adapter_id))

    def _filled(self, adapter_id: AdapterId) -> str:
        values = {"id": str(adapter_id), "finetune_id": adapter_id.name, "step": adapter_id.step or ""}
        return self._template.format(**{name: quote(value, safe="") for name, value in values.items()})
