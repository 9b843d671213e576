"""Simulated device memory: every slot holds a value that names the whole prefix it was computed from."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from kestrel.cache import CacheManager, PageLease
from kestrel.cache.radix import Keys, RadixNode, RadixPrefixCache, context_keys
from kestrel.tokens import ContextItem, ImageSpan, num_positions


def prefix_values(namespace: Hashable, keys: Keys) -> list[int]:
    """One value per position, different for different prefixes."""
    values: list[int] = []
    state = hash(namespace)
    for key in keys:
        state = hash((state, key))
        width = key.num_positions if isinstance(key, ImageSpan) else 1
        values += [hash((state, offset)) for offset in range(width)]
    return values


class Device:
    """Pages of slots. A page that nobody holds, or that was just allocated, holds nothing of use."""

    def __init__(self, manager: CacheManager) -> None:
        self.manager = manager
        self.page_size = manager.page_size
        self.slots: list[list[int | None]] = [[None] * self.page_size for _ in range(manager.num_pages)]
        self.sequences: list[SimulatedSequence] = []

    def start(self, namespace: Hashable, items: Sequence[ContextItem]) -> SimulatedSequence:
        sequence = SimulatedSequence(self, namespace, items)
        self.sequences.append(sequence)
        return sequence

    def poison(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.slots[page] = [None] * self.page_size

    def read(self, pages: Sequence[int], start: int, end: int) -> list[int | None]:
        return [self.slots[pages[p // self.page_size]][p % self.page_size] for p in range(start, end)]

    def verify(self) -> None:
        """Everything any sequence or cached node relies on is still there."""
        for sequence in self.sequences:
            sequence.verify()
        prefixes = self.manager._prefixes
        if not isinstance(prefixes, RadixPrefixCache):
            return
        for namespace, root in prefixes._roots.items():
            pending: list[tuple[RadixNode, Keys]] = [(child, ()) for child in root.children.values()]
            while pending:
                node, prefix = pending.pop()
                keys = prefix + node.keys
                self._verify_node(node, prefix_values(namespace, keys))
                pending += [(child, keys) for child in node.children.values()]

    def _verify_node(self, node: RadixNode, values: list[int]) -> None:
        first = node.start // self.page_size
        held = [slot for page in node.pages for slot in self.slots[page]][: node.end - first * self.page_size]
        assert held == values[first * self.page_size :], (
            f"a cached node from {node.start} to {node.end} was overwritten"
        )


class SimulatedSequence:
    """One lease and the writes a model would do through it."""

    def __init__(self, device: Device, namespace: Hashable, items: Sequence[ContextItem]) -> None:
        self.device = device
        self.namespace = namespace
        self.items = list(items)
        self.values = prefix_values(namespace, context_keys(items))
        self.lease: PageLease = device.manager.acquire(namespace, items)
        self.num_written = self.lease.num_cached
        self.copied = False
        assert self.num_written < len(self.values), "the last item must be computed"
        assert len(self.lease.pages) == -(-len(self.values) // device.page_size)
        self._verify_copy_sources()
        device.poison(self.lease.pages[self.lease.num_shared_pages :])
        self.verify()

    def copy(self) -> None:
        for source, target in self.lease.take_copies():
            self.device.slots[target] = list(self.device.slots[source])
        self.copied = True
        self.verify()

    def write_items(self, num_items: int) -> None:
        """Computes the next items of the context."""
        if not self.copied:
            self.copy()
        num_done = self.num_complete_items()
        end = num_positions(self.items[: num_done + num_items])
        for position in range(self.num_written, end):
            index, slot = divmod(position, self.device.page_size)
            assert index >= self.lease.num_shared_pages, "a shared page is written"
            self.device.slots[self.lease.pages[index]][slot] = self.values[position]
        self.num_written = end

    def grow(self, items: Sequence[ContextItem]) -> None:
        """Adds items to the context, as decoding does."""
        longer = [*self.items, *items]
        num_before = len(self.lease.pages)
        num_added = self.lease.extend_to(num_positions(longer))
        self.device.poison(self.lease.pages[num_before:])
        assert len(self.lease.pages) == num_before + num_added
        self.items = longer
        self.values = prefix_values(self.namespace, context_keys(longer))

    def publish(self, num_items: int) -> None:
        """Publishes that many items, or all complete ones if fewer."""
        if not self.copied:
            self.copy()
        self.lease.publish(self.items[: min(num_items, self.num_complete_items())])

    def release(self) -> None:
        pages = self.lease.pages
        self.lease.release()
        self.device.sequences.remove(self)
        self.device.poison([page for page in pages if self.device.manager._pool.refcount(page) == 0])

    def num_complete_items(self) -> int:
        end = 0
        for index, item in enumerate(self.items):
            end += num_positions([item])
            if end > self.num_written:
                return index
        return len(self.items)

    def verify(self) -> None:
        end = self.num_written if self.copied else self.lease.num_shared_pages * self.device.page_size
        assert self.device.read(self.lease.pages, 0, end) == self.values[:end], "a sequence lost what it computed"

    def _verify_copy_sources(self) -> None:
        start = self.lease.num_shared_pages * self.device.page_size
        num_partial = self.lease.num_cached - start
        assert len(self.lease.copies) == (1 if num_partial else 0)
        for source, target in self.lease.copies:
            assert target == self.lease.pages[self.lease.num_shared_pages]
            assert self.device.slots[source][:num_partial] == self.values[start : start + num_partial]
