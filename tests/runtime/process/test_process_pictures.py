"""Pictures that are encoded in slices cross once, and both sides agree on which are there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kestrel.images.picture import RgbImage
from kestrel.runtime.contract import PictureSlice, PrefillChunk, RuntimeLimits, StepPlan
from kestrel.runtime.fake import NUM_CROPS, FakeRuntime
from kestrel.runtime.process import ProcessRuntime
from kestrel.runtime.process.packing import pack, unpack
from kestrel.runtime.process.pictures import MAX_BYTES, MAX_PICTURES, HeldPictures
from kestrel.tokens import ImageSpan, TextToken
from tests.runtime.process.other_end import connected_to


def picture(index: int) -> RgbImage:
    return RgbImage.from_pixels(np.full((2, 3, 3), index, dtype=np.uint8))


def slices(*pictures: RgbImage) -> StepPlan:
    return StepPlan(0, picture_slices=[PictureSlice(one.digest, one, 1) for one in pictures])


def prefill(*pictures: RgbImage) -> StepPlan:
    return StepPlan(
        0, prefill=[PrefillChunk(0, 0, (ImageSpan(p.digest, 4),), 4, False, {p.digest: p}) for p in pictures]
    )


class BothSides:
    def __init__(self) -> None:
        self.ours, self.theirs = HeldPictures(), HeldPictures()

    def cross(self, plan: StepPlan) -> list[RgbImage]:
        """What is sent with a plan; it must arrive complete."""
        sent = self.ours.missing(plan)
        arrived = unpack(pack(plan))
        self.theirs.complete(arrived, sent)
        assert [one.image for one in arrived.picture_slices] == [one.image for one in plan.picture_slices]
        assert [dict(chunk.images) for chunk in arrived.prefill] == [dict(chunk.images) for chunk in plan.prefill]
        assert list(self.ours) == list(self.theirs)
        return list(sent)


def test_a_picture_in_slices_is_sent_once_and_forgotten_when_prefilled() -> None:
    sides, one = BothSides(), picture(1)
    assert sides.cross(slices(one)) == [one]
    assert sides.cross(slices(one)) == []
    assert sides.cross(prefill(one)) == []
    assert list(sides.theirs) == []
    assert sides.cross(prefill(one)) == [one], "nobody holds it any more"


def test_a_picture_that_is_prefilled_at_once_is_not_held() -> None:
    sides, one, two = BothSides(), picture(1), picture(2)
    assert sides.cross(prefill(one, two)) == [one, two]
    assert list(sides.ours) == []


def test_the_oldest_is_let_go_and_sent_again() -> None:
    sides, pictures = BothSides(), [picture(index) for index in range(MAX_PICTURES + 1)]
    for one in pictures:
        assert sides.cross(slices(one)) == [one]
    assert sides.cross(slices(pictures[1])) == []
    assert sides.cross(slices(pictures[0])) == [pictures[0]]


def test_large_ones_push_out_older_ones_and_the_side_that_sends_keeps_none() -> None:
    sides = BothSides()
    pictures = [large_picture(index) for index in range(4)]
    assert pictures[0].pixels.nbytes * 3 > MAX_BYTES > pictures[0].pixels.nbytes * 2
    for one in pictures:
        assert sides.cross(slices(one)) == [one]
    assert list(sides.theirs) == [one.digest for one in pictures[2:]]
    assert all(held.image is None for held in sides.ours._held.values())


def large_picture(index: int) -> RgbImage:
    return RgbImage(np.broadcast_to(np.uint8(0), (5_000, 10_000 // 3, 3)), f"{index}")


def test_text_carries_no_picture() -> None:
    sides, one = BothSides(), picture(1)
    plan = StepPlan(0, prefill=[PrefillChunk(0, 0, (TextToken(1),), 1, True, {one.digest: one})])
    assert sides.ours.missing(plan) == ()


def test_what_has_been_encoded_ahead_is_known_here() -> None:
    limits = RuntimeLimits(2, 64, 40, 4, 32, 1)
    runtime = ProcessRuntime(connected_to(FakeRuntime(limits, vocab_size=320)), limits)
    one = picture(1)
    for count in range(1, NUM_CROPS + 1):
        assert not runtime.has_encoded(one.digest)
        runtime.collect(runtime.launch(replace(slices(one), step_id=count)))
        assert runtime.has_encoded(one.digest) == (count == NUM_CROPS)
