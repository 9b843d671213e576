"""Which numbers of crops are captured, and when. Real captures are tested on a GPU."""

from __future__ import annotations

import copy

import torch

from kestrel.kernels.ops import PLAIN
from kestrel.moondream.decoder import MoondreamDecoder
from kestrel.runtime.pictures import VisionGraphs
from tests.moondream.coarse import coarse
from tests.runtime.repeating_pool import RepeatingPool


@torch.inference_mode()
def test_numbers_of_crops_run_once_before_they_are_captured() -> None:
    decoder, pool = MoondreamDecoder(copy.deepcopy(coarse("md2").model)), RepeatingPool()
    decoder.fuse(PLAIN)
    vision = decoder.vision
    assert vision is not None
    graphs = VisionGraphs(vision, 4, pool)
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
