"""What steps need: what is measured, and what follows from it. Real memory is measured on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kestrel.config import RuntimeConfig
from kestrel.kernels.ops import PLAIN
from kestrel.moondream import limits
from kestrel.moondream.limits import CROPS_OF_A_PICTURE, CROPS_ON_CPU, CROPS_ON_GPU, batch_crops
from kestrel.moondream.runtime import MoondreamDecoder
from kestrel.runtime.working_memory import ROOM, WorkingMemory, measure_working_memory
from tests.moondream.goldens import golden

MIB = 2**20
MEASURED = WorkingMemory(per_crop=10 * MIB, prefill=100 * MIB, is_captured=True)


@pytest.mark.parametrize("name", ["md2", "md3"])
@pytest.mark.parametrize("is_fused", [False, True])
def test_a_large_picture_and_a_full_step_are_measured(name: str, is_fused: bool) -> None:
    decoder = MoondreamDecoder(copy.deepcopy(golden(name).model))
    if is_fused:
        decoder.fuse(PLAIN)
    results: list[Any] = []

    def peak(device: torch.device, work: Callable[[], object]) -> int:
        results.append(work())
        return 1000

    found = measure_working_memory(decoder, 300, torch.float32, is_captured=True, peak=peak)
    assert found.per_crop < 1000 / 5, "shared by the crops of one picture"
    assert found.prefill == 1000
    [picture], hidden = results
    assert picture.shape == (729, decoder.shape.hidden_dim)
    assert hidden.shape == (300, decoder.shape.hidden_dim)
    assert hidden.isfinite().all()


def test_captured_steps_need_their_memory_twice() -> None:
    assert MEASURED.planned(4) == ROOM + 3 * 140 * MIB
    assert replace(MEASURED, is_captured=False).planned(4) == ROOM + 1.5 * 140 * MIB


def test_crops_are_as_many_as_the_memory_left_to_steps_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    for free_gib, expected in ((100, CROPS_ON_GPU), (8, 27), (2, CROPS_OF_A_PICTURE)):
        monkeypatch.setattr(limits, "free_memory_bytes", lambda device, free_gib=free_gib: free_gib * 2**30)
        found = batch_crops(RuntimeConfig(), gpu, MEASURED)
        assert found == expected
        if expected == 27:
            assert MEASURED.planned(found) <= 0.2 * free_gib * 2**30 < MEASURED.planned(found + 1)
        assert batch_crops(RuntimeConfig(vision_batch_crops=50), gpu, MEASURED) == 50
    assert batch_crops(RuntimeConfig(), torch.device("cpu"), None) == CROPS_ON_CPU
