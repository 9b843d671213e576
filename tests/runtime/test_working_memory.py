"""What steps need: what is measured, and what follows from it. Real memory is measured on a GPU."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from kestrel.config import RuntimeConfig
from kestrel.images.picture import RgbImage
from kestrel.kernels.ops import PLAIN
from kestrel.kernels.row_tables import BIAS, ID_LIMITS, MASK, PENALTIES
from kestrel.moondream.decoder import MoondreamDecoder
from kestrel.runtime import bring_up
from kestrel.runtime.bring_up import (
    CROPS_OF_A_PICTURE,
    CROPS_ON_CPU,
    CROPS_ON_GPU,
    batch_crops,
    batch_sizes,
    prefill_budget,
)
from kestrel.runtime.memory import ROOM, WorkingMemory, measure_working_memory
from kestrel.runtime.rows import WishTable, sampling_bytes
from tests.exhaustive import sweep
from tests.moondream.coarse import POSITIONS, coarse

CPU = torch.device("cpu")
MIB = 2**20
MEASURED = WorkingMemory(per_crop=10 * MIB, prefill=100 * MIB, is_captured=True)


@sweep(("name", "is_fused"), [("md2", False), ("md3", True)], always=[("md3", True)])
def test_a_large_picture_and_a_full_step_are_measured(name: str, is_fused: bool) -> None:
    decoder = MoondreamDecoder(copy.deepcopy(coarse(name).model))
    if is_fused:
        decoder.fuse(PLAIN)
    results: list[Any] = []

    def peak(device: torch.device, work: Callable[[], object]) -> int:
        results.append(work())
        return 1000

    found = measure_working_memory(
        decoder, 300, torch.float32, is_captured=True, by_kernels=is_fused, picture_side=500, peak=peak
    )
    picture = RgbImage.from_pixels(np.zeros((500, 500, 3), np.uint8))
    assert decoder.vision is not None
    num_crops = decoder.vision.prepare_image(picture).num_crops
    assert num_crops > 1
    assert found.per_crop == math.ceil(1000 / num_crops), "shared by the crops of one picture"
    assert found.prefill == 1000
    [embedded], hidden = results
    assert embedded.shape == (POSITIONS - 1, decoder.shape.hidden_dim)
    assert hidden.shape == (300, decoder.shape.hidden_dim)
    assert hidden.isfinite().all()


def test_scores_and_all_that_rows_may_wish_are_planned_for() -> None:
    num_rows, vocab_size = 4, 1000
    table = WishTable(num_rows, vocab_size, CPU)
    every = table.tensors(PENALTIES | BIAS | MASK | ID_LIMITS)
    wide = [getattr(every, field.name) for field in fields(every)]
    held = sum(one.nbytes for one in wide if one.shape[-1] > 8)
    scores = (2 + 4) * (num_rows + 1) * vocab_size
    assert sampling_bytes(num_rows + 1, vocab_size) == held + scores
    assert replace(MEASURED, sampling=7).planned(4) == MEASURED.planned(4) + 7


def test_captured_steps_need_their_memory_twice() -> None:
    assert MEASURED.planned(4) == ROOM + 3 * 140 * MIB
    assert replace(MEASURED, is_captured=False).planned(4) == ROOM + 1.5 * 140 * MIB


def test_crops_are_as_many_as_the_memory_left_to_steps_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    for free_gib, expected in ((100, CROPS_ON_GPU), (8, 27), (2, CROPS_OF_A_PICTURE)):
        monkeypatch.setattr(bring_up, "free_memory_bytes", lambda device, free_gib=free_gib: free_gib * 2**30)
        assert batch_crops(RuntimeConfig(kv_cache_memory_fraction=0.98), gpu, MEASURED) == expected
        assert batch_crops(RuntimeConfig(vision_batch_crops=50), gpu, MEASURED) == 50
    assert batch_crops(RuntimeConfig(), CPU, None) == CROPS_ON_CPU
    assert MEASURED.planned(27) <= 0.2 * 8 * 2**30 < MEASURED.planned(28)


def test_a_step_has_no_more_positions_than_all_rows_together() -> None:
    shape = MoondreamDecoder(coarse("md2").model).shape
    assert prefill_budget(RuntimeConfig(max_batch_size=4), shape, CPU) == 2048
    for length, expected in ((None, 3 * shape.max_context), (500, 1500)):
        config = RuntimeConfig(max_batch_size=3, max_prefill_tokens=2**20, max_seq_length=length)
        assert prefill_budget(config, shape, CPU) == expected


@pytest.mark.parametrize(
    ("largest", "most_as_they_are", "sizes"),
    [
        (1, 1000, [1]),
        (16, 1000, [1, 2, 4, 8, 16]),
        (70, 1000, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 70]),
        (1, 1, [1]),
        (16, 1, [1, 64]),
        (24, 16, [1, 2, 4, 8, 16, 64]),
        (200, 1, [1, 64, 128, 200]),
    ],
)
def test_batches_are_filled_up_to_sizes_that_hold_the_largest(
    largest: int, most_as_they_are: int, sizes: list[int]
) -> None:
    assert batch_sizes(largest, lambda rows: rows if rows <= most_as_they_are else max(rows, 64)) == sizes
