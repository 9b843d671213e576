"""The sources that a configuration asks for, as one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from kestrel.adapters.adapter import AdapterId
from kestrel.adapters.sources.disk_cache import CacheFolder, default_cache_folder
from kestrel.adapters.sources.folder import FolderSource
from kestrel.adapters.sources.source import AdapterCopy, AdapterListing, AdapterSource
from kestrel.config import RuntimeConfig
from kestrel.errors import AdapterGone, AdapterNotFound, did_you_mean

API_KEY_VARIABLE = "MOONDREAM_API_KEY"


class SourceChain:
    """The first source that has an adapter on this machine gives it, else the first that knows the id.

    A source that fails, rather than not knowing an id, ends the search: what is served must not depend on luck.
    """

    def __init__(self, sources: Sequence[AdapterSource]) -> None:
        self._sources = tuple(sources)

    @property
    def title(self) -> str:
        return " and ".join(source.title for source in self._sources) or "no source"

    @property
    def downloads(self) -> bool:
        return any(source.downloads for source in self._sources)

    async def stored(self, adapter_id: AdapterId) -> AdapterCopy | None:
        for source in self._sources:
            if (copy := await source.stored(adapter_id)) is not None:
                return copy
        return None

    async def fetch(self, adapter_id: AdapterId) -> AdapterCopy:
        copy = await self.stored(adapter_id)
        if copy is not None:
            return copy
        gone: AdapterGone | None = None
        for source in self._sources:
            if not source.downloads:
                continue
            try:
                return await source.fetch(adapter_id)
            except AdapterGone as error:
                gone = gone or error
            except AdapterNotFound:
                continue
        if gone is not None:
            raise gone
        if not self._sources:
            raise AdapterNotFound(
                f"adapter '{adapter_id}': this engine has no source of adapters; start it with "
                f"--adapter-dir (adapter_dir), --adapter-url-template or {API_KEY_VARIABLE}, or leave the adapter out"
            )
        names = [listing.name for source in self._sources if not source.downloads for listing in await source.list()]
        close = did_you_mean(adapter_id, names)
        raise AdapterNotFound(f"adapter '{adapter_id}' was not found in {self.title}; check the id{close}")

    async def list(self) -> Sequence[AdapterListing]:
        """Each name once: what a later source has under the same name is never served."""
        listings: dict[str, AdapterListing] = {}
        for source in self._sources:
            for listing in await source.list():
                listings.setdefault(listing.name, listing)
        return list(listings.values())

    async def close(self) -> None:
        await asyncio.gather(*(source.close() for source in self._sources))


def given_key(api_key: str | None = None) -> str | None:
    """The key for hosted adapters: the one that is passed, or that of the environment."""
    return api_key or os.environ.get(API_KEY_VARIABLE) or None


def has_adapter_source(config: RuntimeConfig, api_key: str | None) -> bool:
    return config.adapter_dir is not None or config.adapter_url_template is not None or bool(api_key)


def configured_sources(config: RuntimeConfig, api_key: str | None = None) -> SourceChain:
    """The folder first, then the URL template, then, with a key, the hosted service. Sweeps the cache folder."""
    cache_folder, max_bytes = config.adapter_cache_folder or default_cache_folder(), config.adapter_cache_bytes
    sources: list[AdapterSource] = []
    if config.adapter_folder is not None:
        sources.append(FolderSource(config.adapter_folder))
    if config.adapter_url_template is not None:
        # Here and not above: a web client takes 0.1 s to import, and few engines download adapters.
        from kestrel.adapters.sources.remote import UrlTemplateSource  # noqa: PLC0415

        sources.append(UrlTemplateSource(config.adapter_url_template, cache_folder, max_cache_bytes=max_bytes))
    if api_key:
        from kestrel.adapters.sources.remote import HostedSource  # noqa: PLC0415 - as above

        sources.append(HostedSource(api_key, cache_folder, max_cache_bytes=max_bytes))
    chain = SourceChain(sources)
    if chain.downloads:
        CacheFolder(cache_folder, max_bytes).sweep()
    return chain
