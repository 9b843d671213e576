"""More than a hundred thousand random operations, everything recounted after each of them."""

from __future__ import annotations

import random

import pytest

from kestrel.cache import CacheManager
from kestrel.errors import OutOfPages
from kestrel.tokens import ContextItem, CoordToken, ImageSpan, TextToken
from tests.exhaustive import sweep

from .device_model import Device, SimulatedSequence

CONTENT_CHECK_INTERVAL = 25
"""Page contents are compared in full once in so many steps; new matches are compared always."""


class RandomLoad:
    """A few sequences at a time over contexts that often share prefixes."""

    def __init__(self, seed: int, page_size: int, num_pages: int) -> None:
        self.rng = random.Random(seed)
        self.device = Device(CacheManager(num_pages, page_size))
        self.page_size = page_size
        self.num_operations = 0
        self.num_refusals = 0

    def step(self) -> None:
        """Up to two cache operations; what a sequence computes by itself is not counted."""
        sequences = self.device.sequences
        action = self.rng.random()
        if not sequences or (len(sequences) < 4 and action < 0.25):
            return self.start()
        sequence = self.rng.choice(sequences)
        if action < 0.45:
            sequence.write_items(self.rng.randint(1, 4))
        elif action < 0.65:
            sequence.publish(self.rng.randint(1, len(sequence.items)))
            self.num_operations += 1
        elif action < 0.8:
            self.try_growing(sequence)
        elif action < 0.999:
            if self.rng.random() < 0.8:
                sequence.write_items(len(sequence.items))
                sequence.publish(len(sequence.items))
                self.num_operations += 1
            sequence.release()
            self.num_operations += 1
        else:
            self.device.manager.clear()
            self.num_operations += 1

    def start(self) -> None:
        self.num_operations += 1
        namespace = self.rng.choice("aab")
        try:
            self.device.start(namespace, [self.item() for _ in range(self.rng.randint(1, 8))])
        except OutOfPages:
            self.num_refusals += 1

    def try_growing(self, sequence: SimulatedSequence) -> None:
        self.num_operations += 1
        try:
            sequence.grow([self.item() for _ in range(self.rng.randint(1, 2))])
        except OutOfPages:
            self.num_refusals += 1

    def item(self) -> ContextItem:
        kind = self.rng.random()
        if kind < 0.75:
            return TextToken(self.rng.choice((0, 0, 0, 1)))
        if kind < 0.85:
            return CoordToken(self.rng.choice((0.25, 0.5)))
        return ImageSpan(
            self.rng.choice("xy"), self.rng.choice((1, self.page_size, self.page_size + self.page_size // 2))
        )


@sweep("num_operations", [5_000, 30_000], always=[5_000])
@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 20), (3, 14), (16, 12), (64, 9)])
def test_random_operations_keep_the_cache_whole(page_size: int, num_pages: int, num_operations: int) -> None:
    load = RandomLoad(page_size, page_size, num_pages)
    manager = load.device.manager
    num_steps = 0
    while load.num_operations < num_operations:
        load.step()
        num_steps += 1
        manager.check_integrity()
        if num_steps % CONTENT_CHECK_INTERVAL == 0:
            load.device.verify()
    stats = manager.stats()
    assert stats.hits > num_operations // 50
    assert stats.evicted_pages > num_operations // 50
    assert load.num_refusals > 0
    for sequence in list(load.device.sequences):
        sequence.release()
    manager.clear()
    assert manager.num_free_pages == num_pages
