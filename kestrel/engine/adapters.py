"""From the adapter that a request names to what the scheduler runs."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kestrel.adapters.crossing import in_shared_memory
from kestrel.adapters.ids import AdapterId
from kestrel.adapters.library import AdapterLibrary, LibrarySnapshot
from kestrel.adapters.sources import AdapterListing, configured_sources
from kestrel.config import RuntimeConfig
from kestrel.errors import AdapterNotFound
from kestrel.families import ReadyModel
from kestrel.request import AdapterUse

API_KEY_VARIABLE = "MOONDREAM_API_KEY"


class EngineAdapters:
    """The adapters of one engine; without a source of them it knows none."""

    def __init__(self, library: AdapterLibrary | None) -> None:
        self._library = library

    async def use(self, name: str) -> AdapterUse:
        """Fetches and loads it if need be. Raises what `AdapterLibrary.get` raises."""
        if self._library is None:
            adapter_id = AdapterId.parse(name)
            raise AdapterNotFound(
                f"adapter '{adapter_id}': this engine has no source of adapters; start it with adapter_dir, "
                "adapter_url_template or MOONDREAM_API_KEY, or leave the adapter out"
            )
        loaded = await self._library.get(name)
        return AdapterUse(loaded.adapter_id, loaded.key, loaded.adapter)

    async def list(self) -> Sequence[AdapterListing]:
        return [] if self._library is None else await self._library.list()

    def snapshot(self) -> LibrarySnapshot | None:
        return None if self._library is None else self._library.snapshot()

    async def close(self) -> None:
        if self._library is not None:
            await self._library.close()


def given_key(api_key: str | None = None) -> str | None:
    """The key for hosted adapters: the one that is passed, or that of the environment."""
    return api_key or os.environ.get(API_KEY_VARIABLE) or None


def has_adapter_source(config: RuntimeConfig, api_key: str | None) -> bool:
    return config.adapter_dir is not None or config.adapter_url_template is not None or bool(api_key)


def engine_adapters(config: RuntimeConfig, ready: ReadyModel, api_key: str | None) -> EngineAdapters:
    if not has_adapter_source(config, api_key):
        return EngineAdapters(None)
    library = AdapterLibrary(
        configured_sources(config, api_key),
        ready.adapter_shape,
        [ready.profile.name],
        max_rank=config.max_adapter_rank,
        max_bytes=config.adapter_memory_bytes,
        place=in_shared_memory if ready.computes_apart else None,
    )
    return EngineAdapters(library)
