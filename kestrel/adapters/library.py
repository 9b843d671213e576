"""From an adapter's id to the checked adapter in memory, with the most recently used ones kept.

What is kept is known by `key`, the id and the digest of the contents: when a file changes under its name, the next
request gets the new adapter, and running ones keep theirs.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from kestrel.adapters.adapter import Adapter, AdapterId, AdapterShape
from kestrel.adapters.loading import load_adapter
from kestrel.adapters.single_flight import SingleFlight
from kestrel.adapters.sources.source import AdapterCopy, AdapterListing, AdapterSource
from kestrel.errors import AdapterUnusable, CheckpointError
from kestrel.threads import Threads

MAX_LOADS_AT_ONCE = 2
REFUSED_FOR_S = 5.0
MAX_REFUSALS = 256
_MAX_TRIES = 3
_DIGEST_LETTERS = 16


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    adapter: Adapter
    key: str
    """`id#digest`: the same for the same contents, different for different ones."""
    adapter_id: str
    num_bytes: int
    load_seconds: float
    """From the first request to the checked adapter, a download included."""


@dataclass(frozen=True)
class LibrarySnapshot:
    """How busy a library is; the totals count since it was made."""

    kept: tuple[LoadedAdapter, ...]
    """The least recently used first."""
    kept_bytes: int
    max_bytes: int
    num_loading: int
    loads_total: int
    failures_total: int
    evictions_total: int
    load_seconds_total: float


class AdapterLibrary:
    """For one event loop and one base model."""

    def __init__(
        self,
        source: AdapterSource,
        shape: AdapterShape,
        base_models: Collection[str],
        *,
        max_rank: int,
        max_bytes: int,
        place: Callable[[Adapter], Adapter] | None = None,
    ) -> None:
        """`base_models`: names of the served model; a file that names another one is refused. Empty: any will do.

        `place` puts an adapter that was read where the runtime gets at it; it runs on the thread that reads.
        """
        self._source = source
        self._shape = shape
        self._base_models = tuple(base_models)
        self._max_rank = max_rank
        self._max_bytes = max_bytes
        self._place = place
        self._kept: OrderedDict[str, LoadedAdapter] = OrderedDict()
        self._refusals: OrderedDict[str, tuple[float, str]] = OrderedDict()
        self._loads: SingleFlight[LoadedAdapter | None] = SingleFlight()
        self._threads = Threads("adapter-loading", MAX_LOADS_AT_ONCE)
        self._loads_total = 0
        self._failures_total = 0
        self._evictions_total = 0
        self._load_seconds_total = 0.0

    async def get(self, adapter_id: str) -> LoadedAdapter:
        """The adapter as it is now. Raises RequestError, AdapterNotFound, AdapterUnusable or AdapterSourceError."""
        started_s = time.monotonic()
        parsed = AdapterId.parse(adapter_id)
        for _ in range(_MAX_TRIES):
            copy = await self._source.fetch(parsed)
            key = f"{parsed}#{copy.digest[:_DIGEST_LETTERS]}"
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            self._refuse_known(key)
            loaded = await self._loads.join(key, lambda k=key, c=copy: self._load(parsed, k, c, started_s))
            if loaded is not None:
                return loaded
        raise AdapterUnusable(f"adapter '{parsed}': its file keeps changing; try again when it is complete")

    async def list(self) -> Sequence[AdapterListing]:
        """Adapters that can be asked for, as far as the sources can name them."""
        return [listing for listing in await self._source.list() if listing.problem is None]

    def snapshot(self) -> LibrarySnapshot:
        return LibrarySnapshot(
            kept=tuple(self._kept.values()),
            kept_bytes=self._kept_bytes(),
            max_bytes=self._max_bytes,
            num_loading=self._loads.num_running,
            loads_total=self._loads_total,
            failures_total=self._failures_total,
            evictions_total=self._evictions_total,
            load_seconds_total=self._load_seconds_total,
        )

    async def close(self) -> None:
        await self._loads.close()
        await self._source.close()
        self._threads.close()
        self._kept.clear()

    async def _load(self, adapter_id: AdapterId, key: str, copy: AdapterCopy, started_s: float) -> LoadedAdapter | None:
        """None when the file changed meanwhile, so that what was read may be neither the old nor the new one."""
        try:
            adapter = await self._threads.run(self._read, copy)
            problem = self._misfit(adapter)
        except CheckpointError as error:
            adapter, problem = None, _without_path(str(error), copy)
        if not copy.is_current:
            return None
        if adapter is None or problem is not None:
            self._failures_total += 1
            message = f"adapter '{adapter_id}': {problem}"
            self._remember_refusal(key, message)
            raise AdapterUnusable(message)
        loaded = LoadedAdapter(adapter, key, str(adapter_id), num_bytes(adapter), time.monotonic() - started_s)
        self._loads_total += 1
        self._load_seconds_total += loaded.load_seconds
        self._keep(loaded)
        return loaded

    def _read(self, copy: AdapterCopy) -> Adapter:
        adapter = load_adapter(copy.path, self._shape)
        return adapter if self._place is None else self._place(adapter)

    def _misfit(self, adapter: Adapter) -> str | None:
        """Why an adapter that is sound cannot be served here."""
        served = {_bare(name) for name in self._base_models}
        if served and adapter.base_model is not None and _bare(adapter.base_model) not in served:
            return f"it was made for the model {adapter.base_model!r}, but {' or '.join(self._base_models)} is served"
        if adapter.rank > self._max_rank:
            return f"its rank is {adapter.rank}, above max_adapter_rank {self._max_rank}; start with a larger one"
        return None

    def _keep(self, loaded: LoadedAdapter) -> None:
        """An adapter larger than the bound is served, and not kept; an earlier version of its file makes way."""
        for key in [key for key, other in self._kept.items() if other.adapter_id == loaded.adapter_id]:
            del self._kept[key]
        self._kept[loaded.key] = loaded
        while self._kept_bytes() > self._max_bytes:
            self._kept.popitem(last=False)
            self._evictions_total += 1

    def _kept_bytes(self) -> int:
        return sum(loaded.num_bytes for loaded in self._kept.values())

    def _remember_refusal(self, key: str, message: str) -> None:
        self._refusals[key] = (time.monotonic() + REFUSED_FOR_S, message)
        while len(self._refusals) > MAX_REFUSALS:
            self._refusals.popitem(last=False)

    def _refuse_known(self, key: str) -> None:
        """The same contents that were refused a moment ago are not read again."""
        if key not in self._refusals:
            return
        until_s, message = self._refusals[key]
        if time.monotonic() < until_s:
            raise AdapterUnusable(message)
        del self._refusals[key]


def num_bytes(adapter: Adapter) -> int:
    return sum(tensor.nbytes for pair in adapter.targets.values() for tensor in (pair.a, pair.b))


def _bare(model: str) -> str:
    """A model's name without its publisher."""
    return model.rsplit("/", 1)[-1]


def _without_path(message: str, copy: AdapterCopy) -> str:
    """Whoever asks for an adapter must not learn where it lies."""
    plain = message.replace(str(copy.path), "its file").replace(str(copy.path.parent), "its folder")
    return "; ".join(line.strip() for line in plain.splitlines()).replace(":; ", ": ")
