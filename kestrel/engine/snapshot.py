"""The engine's numbers at one moment, for gauges and load balancers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kestrel.adapters.library import LibrarySnapshot
from kestrel.cache import CacheManager
from kestrel.scheduler import GenerationScheduler


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """Counts right now, and totals since the start (`*_total`).

    The worker does not stop to be counted: numbers taken while it runs may be one step apart from each other.
    """

    num_running: int
    """Requests that hold a row of the batch."""
    num_waiting: int
    """Accepted requests that hold none: picture being decoded, queued, or parked behind another's picture."""
    num_pages: int
    num_used_pages: int
    """Pages that running requests hold; an allocation cannot get them."""
    num_cached_pages: int
    """Pages that hold a prefix which later requests can take, held by running ones or not."""
    page_size: int
    """Positions per page."""
    max_batch_size: int
    prefix_query_tokens_total: int
    """Positions looked up in the prefix cache."""
    prefix_hit_tokens_total: int
    """Positions found there."""
    evicted_pages_total: int
    preemptions_total: int
    num_adapter_slots: int = 0
    """Adapters that can be in use at the same time."""
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()
    """Those that wait for a slot."""
    adapter_slot_loads_total: int = 0
    """Adapters copied to the device."""
    kept_adapters: tuple[str, ...] = ()
    """In the host's memory, ready for a slot."""
    adapter_loads_total: int = 0
    """Adapters read from files."""
    adapter_load_failures_total: int = 0
    adapter_load_seconds_total: float = 0.0
    """Spent on those reads, downloads included."""
    num_replicas: int = 1
    """Engines that these numbers are of."""
    retries_total: int = 0
    """Requests that were begun again, or went on, in another engine because theirs was lost."""

    @property
    def kv_usage(self) -> float:
        """Share of the pages that running requests hold, 0 to 1."""
        return self.num_used_pages / max(1, self.num_pages)


def take_snapshot(
    scheduler: GenerationScheduler[Any],
    cache: CacheManager,
    max_batch_size: int,
    num_unsent: int,
    library: LibrarySnapshot,
) -> EngineSnapshot:
    """`num_unsent`: accepted requests that the scheduler has not seen yet."""
    pages, adapters = cache.stats(), scheduler.adapters
    return EngineSnapshot(
        num_running=scheduler.num_running,
        num_waiting=num_unsent + scheduler.num_waiting,
        num_pages=pages.num_pages,
        num_used_pages=max(0, pages.num_pages - pages.free_pages - pages.evictable_pages),
        num_cached_pages=pages.cached_pages,
        page_size=cache.page_size,
        max_batch_size=max_batch_size,
        prefix_query_tokens_total=pages.query_positions,
        prefix_hit_tokens_total=pages.hit_positions,
        evicted_pages_total=pages.evicted_pages,
        preemptions_total=scheduler.num_preemptions,
        num_adapter_slots=adapters.num_slots,
        running_adapters=tuple(adapters.running),
        waiting_adapters=tuple(adapters.waiting),
        adapter_slot_loads_total=adapters.loads_total,
        kept_adapters=tuple(adapter.adapter_id for adapter in library.kept),
        adapter_loads_total=library.loads_total,
        adapter_load_failures_total=library.failures_total,
        adapter_load_seconds_total=library.load_seconds_total,
    )
