"""Minutes of mixed traffic, in a second: everyone who stays is answered, and nothing is held at the end."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from kestrel.bench.endurance import SIDES, Traffic, Watch, endure
from kestrel.bench.engine import load_model
from kestrel.config import RuntimeConfig
from kestrel.families import ready_from


@pytest.mark.exhaustive
def test_clients_are_answered_and_nothing_is_held_at_the_end() -> None:
    config = RuntimeConfig(device="cpu", max_batch_size=2, kv_cache_pages=300)
    ready = ready_from(load_model(config, "tiny"), config)
    figures = asyncio.run(endure(config, ready, 0.02, torch.device("cpu")))
    assert figures["answered"] >= 3, "each of three clients stays at least once in a while"
    assert figures["tokens"] > 0
    assert figures["pages_held_at_end"] == 0


def test_pictures_have_all_sizes_and_some_come_again() -> None:
    traffic = Traffic(random.Random(1), max_tokens=5)
    pictures = [traffic.picture() for _ in range(60)]
    assert {side for picture in pictures for side in picture.shape[:2]} == set(SIDES)
    assert len({id(picture) for picture in pictures}) < len(pictures)


def test_memory_counts_as_settled_after_a_tenth_of_the_time() -> None:
    watch = Watch(torch.device("cpu"), [(1.0, 5.0), (2.0, 6.0), *[(3.0, 7.0)] * 17, (2.5, 6.5)])
    assert watch.figures() == {
        "device_gib_settled": 2.0,
        "host_gib_settled": 6.0,
        "device_gib_most": 3.0,
        "host_gib_most": 7.0,
        "device_gib_end": 2.5,
        "host_gib_end": 6.5,
    }
