"""Adapters cross whole: as bytes where they are small, and mapped from memory where they are not."""

from __future__ import annotations

import gc
import os
from multiprocessing.connection import Pipe
from pathlib import Path

import pytest
import torch

from kestrel.adapters import Adapter, AdapterTarget, LowRankPair, shared_memory
from kestrel.adapters.shared_memory import MemoryBlock, SentAdapter, SharedAdapter, in_shared_memory
from kestrel.runtime.contract import AdapterLoad, StepPlan
from kestrel.runtime.process import Connection
from kestrel.runtime.process.messages import RunStep
from kestrel.runtime.process.packing import pack


def made(width: int) -> Adapter:
    """With numbers of every kind, and sizes that leave gaps between them."""
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    pairs = {
        AdapterTarget(layer, "fc1"): LowRankPair(torch.rand(3, width).to(kind), torch.rand(width + 1, 3).to(kind))
        for layer, kind in enumerate(kinds)
    }
    return Adapter("kestrel-adapter", 3, pairs, alpha=6.0, proj_input="block_norm", metadata={"by": "a stranger"})


def crossed(adapter: Adapter) -> Adapter:
    ours, theirs = (Connection(end) for end in Pipe())
    plan = StepPlan(0, adapter_loads=[AdapterLoad(1, "key", adapter)])
    ours.send(RunStep(plan, (), (SentAdapter.of(adapter),)))
    arrived = theirs.receive()
    assert isinstance(arrived, RunStep)
    (sent,) = arrived.adapters
    assert sent is not None
    for end in (ours, theirs):
        end.close()
    return sent.adapter()


@pytest.mark.parametrize("is_shared", [False, True])
def test_an_adapter_arrives_as_it_was(is_shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "MIN_BLOCK_BYTES", 1 if is_shared else 2**40)
    adapter = made(5)
    placed = in_shared_memory(adapter)
    assert isinstance(placed, SharedAdapter) == is_shared
    found = crossed(placed)
    assert (found.rank, found.scale, found.proj_input) == (3, 2.0, "block_norm")
    assert list(found.targets) == list(adapter.targets)
    for target, pair in adapter.targets.items():
        for side in ("a", "b"):
            expected, arrived = getattr(pair, side), getattr(found.targets[target], side)
            assert arrived.dtype == expected.dtype
            assert torch.equal(arrived, expected)


def test_a_large_adapter_leaves_the_message_of_the_step_small() -> None:
    placed = in_shared_memory(made(50_000))
    packed = pack(RunStep(StepPlan(0, adapter_loads=[AdapterLoad(1, "key", placed)]), (), (SentAdapter.of(placed),)))
    assert len(packed.message) + sum(len(array) for array in packed.arrays) < 4000


def test_blocks_and_their_handles_end_with_their_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "MIN_BLOCK_BYTES", 1)

    def num_open() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    if not Path("/proc/self/fd").exists():
        pytest.skip("counts handles in /proc")
    before = num_open()
    placed = in_shared_memory(made(5))
    found = crossed(placed)
    assert num_open() > before
    del placed, found
    assert num_open() == before


def test_what_was_mapped_outlives_the_side_that_sent_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "MIN_BLOCK_BYTES", 1)
    found = crossed(in_shared_memory(made(5)))
    gc.collect()
    assert bool(found.targets[AdapterTarget(0, "fc1")].a.isfinite().all())


def test_handles_are_few_whatever_the_number_of_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "MIN_BLOCK_BYTES", 1)
    monkeypatch.setattr(shared_memory, "MAX_BLOCKS", len(MemoryBlock._living) + 2)
    kept = [in_shared_memory(made(5)) for _ in range(4)]
    assert [isinstance(one, SharedAdapter) for one in kept] == [True, True, False, False]
    assert crossed(kept[3]).rank == 3
