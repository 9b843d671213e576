"""Several sources as one: the first that has an adapter on this machine gives it, else the first that knows the id."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kestrel.adapters.ids import AdapterId
from kestrel.adapters.sources.source import AdapterCopy, AdapterListing, AdapterSource
from kestrel.errors import AdapterGone, AdapterNotFound

REMEDY = "set adapter_dir, adapter_url_template or the environment variable MOONDREAM_API_KEY"


class SourceChain:
    """A source that fails, rather than not knowing an id, ends the search: what is served must not depend on luck."""

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
            raise AdapterNotFound(f"adapter '{adapter_id}': there is no source of adapters; {REMEDY}")
        raise AdapterNotFound(f"adapter '{adapter_id}' was not found in {self.title}; check the id")

    async def list(self) -> Sequence[AdapterListing]:
        """Each name once: what a later source has under the same name is never served."""
        listings: dict[str, AdapterListing] = {}
        for source in self._sources:
            for listing in await source.list():
                listings.setdefault(listing.name, listing)
        return list(listings.values())

    async def close(self) -> None:
        await asyncio.gather(*(source.close() for source in self._sources))
