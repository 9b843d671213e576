"""Which numbers of crops are captured, and when. Real captures are tested on a GPU."""

from __future__ import annotations

import copy

import torch

from kestrel.kernels.ops import PLAIN
from kestrel.models.contract import VisionPart
from kestrel.moondream.decoder import MoondreamDecoder
from kestrel.runtime.pictures import VisionGraphs
from tests.moondream.coarse import coarse
from tests.runtime.repeating_pool import RepeatingPool


def made(max_crops: int) -> tuple[VisionGraphs, RepeatingPool, VisionPart]:
    decoder, pool = MoondreamDecoder(copy.deepcopy(coarse("md2").model)), RepeatingPool()
    decoder.fuse(PLAIN)
    vision = decoder.vision
    assert vision is not None
    return VisionGraphs(vision, max_crops, pool), pool, vision


@torch.inference_mode()
def test_numbers_of_crops_run_once_before_they_are_captured() -> None:
    graphs, pool, vision = made(4)
    graphs.prepare(1)
    assert pool.has_run == [False, False]
    patches, _ = vision.new_crop_buffers(5)
    patches.normal_(generator=torch.Generator().manual_seed(1))
    expected = vision.encode_crops([patches])
    for later, parts in (
        ([], (4,)),
        ([], (3,)),
        ([True], (1, 2)),
        ([True], (3,)),
        ([True], (1,)),
        ([True], (5,)),
        ([True], (5,)),
        ([True], (2,)),
    ):
        count = sum(parts)
        found = graphs.encode_crops(patches[:count].split(parts))
        torch.testing.assert_close(found, expected[:count], rtol=1e-4, atol=1e-5)
        assert pool.has_run == [False, False, *later], "more than there is room for is never captured"


@torch.inference_mode()
def test_while_the_gpu_waits_a_new_number_is_made_up_of_captured_ones_a_few_times() -> None:
    graphs, pool, vision = made(8)
    graphs.prepare(3)
    pool.idle = True
    patches, _ = vision.new_crop_buffers(8)
    patches.normal_(generator=torch.Generator().manual_seed(1))
    expected = vision.encode_crops([patches])
    start = pool.num_captures
    for captures, idle in ((0, True), (0, True), (0, True), (0, True), (1, True), (1, True)):
        pool.idle = idle
        found = graphs.encode_crops(patches[:7].split((4, 3)))
        torch.testing.assert_close(found, expected[:7], rtol=1e-4, atol=1e-5)
        assert pool.num_captures - start == captures
    pool.idle = False
    for captures in (1, 2):
        graphs.encode_crops([patches[:5]])
        assert pool.num_captures - start == captures, "busy: run once, then captured"


@torch.inference_mode()
def test_without_small_captures_a_new_number_runs_as_a_whole() -> None:
    graphs, pool, vision = made(4)
    graphs.prepare(0)
    pool.idle = True
    patches, _ = vision.new_crop_buffers(3)
    torch.testing.assert_close(graphs.encode_crops([patches]), vision.encode_crops([patches]), rtol=1e-4, atol=1e-5)
