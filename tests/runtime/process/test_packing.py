"""What is packed comes out the same, but for the pictures, which travel apart."""

from __future__ import annotations

import pickletools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kestrel.adapters import Adapter, AdapterTarget, LowRankPair
from kestrel.adapters.shared_memory import SentAdapter
from kestrel.errors import CheckpointError, ConfigError, ContextTooLong, KestrelError, NumericalError, RequestError
from kestrel.grammar import Carries, Edge, Grammar, State, free_text
from kestrel.images.picture import RgbImage
from kestrel.request import FinishReason, PromptOutputs, ScoredToken, TokenLogprobs
from kestrel.runtime.contract import (
    AdapterLoad,
    DecodeRow,
    PageCopy,
    PageWrite,
    PictureSlice,
    PrefillChunk,
    PromptPart,
    RowOutput,
    RowStart,
    StepOutput,
    StepPlan,
)
from kestrel.runtime.process.messages import RefineOutline, RunStep, StepDone
from kestrel.runtime.process.packing import RECIPES, pack, portable, unpack
from kestrel.settings import SamplingParams
from kestrel.tokens import CoordToken, ImageSpan, SizeToken, Text, TextToken
from kestrel.train.adapter.samples import DataError

IMAGE = RgbImage.from_pixels(np.arange(60, dtype=np.uint8).reshape(4, 5, 3))
ADAPTER = Adapter(
    "torch-variant", 4, {AdapterTarget(0, "qkv"): LowRankPair(torch.rand(4, 3000), torch.rand(9000, 4).bfloat16())}
)
GRAMMAR = Grammar("boxes", (State("x", Edge(0, 5), ((0, Edge(-1)),), (0, 5), (7,), Carries.COORD, 1, 0),))
SAMPLING = SamplingParams(max_new_tokens=3, temperature=0.5, seed=9, logit_bias=((4, 1.5),), stop=("no",), logprobs=2)
WORDS = (TextToken(4), CoordToken(0.25), SizeToken(0.5, 0.75))
SPAN = ImageSpan(IMAGE.digest, 730, 1)
PLAN = StepPlan(
    7,
    [RowStart(1, GRAMMAR, SAMPLING, 40, 0, 2, 1, (4, 5), (6,), 0), RowStart(2, free_text(0), SamplingParams(), 9)],
    [PageWrite(1, 0, (5, 6, 7)), PageWrite(2, 3, (8,))],
    [PageCopy(3, 4)],
    [
        PrefillChunk(1, 0, (SPAN,), 731, False, {IMAGE.digest: IMAGE}),
        PrefillChunk(2, 0, Text([4, 5]), 2, False),
        PrefillChunk(1, 731, WORDS, 3, True, {}, PromptOutputs(logprobs=1, pool_from=2), TextToken(3)),
    ],
    [DecodeRow(2, 17)],
    {2: b"\x05"},
    [AdapterLoad(0, "key", {"weights": [1.0]})],
    [PictureSlice(IMAGE.digest, IMAGE, 2)],
)
OUTPUT = StepOutput(
    7,
    [
        RowOutput(1, None, FinishReason.STOP, 0, 1, TokenLogprobs(-0.5, ((3, -0.5),)), 0),
        RowOutput(2, WORDS[1], None, 0, 2),
    ],
    {},
    [PromptPart(1, (ScoredToken(-1.0, 2, ((4, -0.5),)),), (0.5, 0.25), 1)],
)


def without_pictures(plan: StepPlan) -> StepPlan:
    chunks = [replace(chunk, images={}) for chunk in plan.prefill]
    slices = [replace(one, image=None) for one in plan.picture_slices]
    loads = [replace(load, weights=None) for load in plan.adapter_loads]
    return replace(plan, prefill=chunks, picture_slices=slices, adapter_loads=loads)


def test_an_adapter_is_neither_pickled_nor_part_of_the_message() -> None:
    plan = StepPlan(0, adapter_loads=[AdapterLoad(1, "key", ADAPTER)])
    packed = pack(RunStep(plan, (), (SentAdapter.of(ADAPTER),)))
    named = [str(value) for code, value, _ in pickletools.genops(packed.message) if "UNICODE" in code.name]
    assert "SentAdapter" in named
    assert not [name for name in named if name.startswith("torch.") or name in ("torch", "Adapter", "LowRankPair")]
    assert len(packed.message) < 2000


def test_a_plan_comes_out_as_it_was_and_its_pictures_beside_it() -> None:
    arrived = unpack(pack(RunStep(PLAN, (IMAGE,))))
    assert arrived.plan == without_pictures(PLAN)
    assert [picture.digest for picture in arrived.pictures] == [IMAGE.digest]
    np.testing.assert_array_equal(arrived.pictures[0].pixels, IMAGE.pixels)


def test_a_plan_weighs_nothing_of_its_pictures() -> None:
    large = RgbImage.from_pixels(np.zeros((1000, 1000, 3), dtype=np.uint8))
    chunk = PrefillChunk(1, 0, (ImageSpan(large.digest, 730),), 730, False, {large.digest: large})
    plan = StepPlan(0, prefill=[chunk], picture_slices=[PictureSlice(large.digest, large, 1)])
    assert len(pack(RunStep(plan, ())).message) < 2000
    packed = pack(RunStep(plan, (large,)))
    assert len(packed.message) < 2000, "pixels are not copied"
    assert [len(array) for array in packed.arrays] == [3_000_000]


@pytest.mark.parametrize("message", [StepDone(OUTPUT, frozenset({"a"})), RefineOutline(IMAGE, "M 0 0", {"x": 0.5})])
def test_other_messages_come_out_as_they_were(message: Any) -> None:
    assert unpack(pack(message)) == message


def test_what_comes_out_is_of_the_same_kinds() -> None:
    """Dataclasses of another class are never equal, but their parts are compared by value alone."""
    start = unpack(pack(PLAN)).starts[0]
    assert (type(start.sampling), type(start.grammar.states[0].carries)) == (SamplingParams, Carries)
    assert hash(start.grammar) == hash(GRAMMAR), "grammars are found by value"


def test_every_recipe_has_been_used() -> None:
    used = {type(part) for part in parts_of([PLAN, OUTPUT, SentAdapter.of(ADAPTER)])}
    ours = {kind for kind in RECIPES if kind.__module__.startswith("kestrel")}
    assert ours <= used


def parts_of(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [part for item in value for part in parts_of(item)]
    if hasattr(value, "__dataclass_fields__"):
        return [value, *parts_of([getattr(value, name) for name in value.__dataclass_fields__])]
    return [value]


@pytest.mark.parametrize(
    "error",
    [ConfigError("device", "no"), RequestError("image", "bad"), ContextTooLong("prompt", "long"), CheckpointError("x")],
)
def test_our_errors_travel_as_they_are(error: Exception) -> None:
    arrived = unpack(pack(portable(error)))
    assert (type(arrived), str(arrived)) == (type(error), str(error))
    assert getattr(arrived, "field", None) == getattr(error, "field", None)
    assert portable(error) is error


def test_errors_with_more_to_say_keep_it() -> None:
    mistake = DataError(["line 3: label: is missing", "line 4: label: is missing"], "nothing was trained")
    arrived = unpack(pack(mistake))
    assert (str(arrived), arrived.mistakes) == (str(mistake), mistake.mistakes)


class Awkward(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def test_an_error_that_cannot_travel_still_says_what_it_says() -> None:
    arrived = portable(Awkward("disk", " full"))
    assert (type(arrived), str(arrived)) == (KestrelError, "Awkward: disk full")
    assert isinstance(portable(NumericalError("nan")), NumericalError)
