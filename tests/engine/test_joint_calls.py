"""Several objects in one call, and all instances of one: answered together, counted apart."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from kestrel.engine import InferenceEngine
from kestrel.errors import EngineStopped, NumericalError, QueueFull, RequestCancelled, RequestError
from kestrel.images.picture import RgbImage
from kestrel.runtime.contract import StepPlan
from kestrel.runtime.fake import FakeRuntime, FakeStep
from tests.engine.fake_engine import fake_engine, fake_limits

PICTURE = RgbImage.from_pixels(np.arange(20 * 40 * 3, dtype=np.uint8).reshape(20, 40, 3))
NAMES = ["gear", "bolt", "red, round button"]
FEW = {"max_objects": 3}


class CountingRuntime(FakeRuntime):
    """Notes how many rows the largest step has."""

    def __init__(self, **limits: int) -> None:
        super().__init__(fake_limits(**limits), vocab_size=320)
        self.most_rows = 0

    def launch(self, plan: StepPlan) -> FakeStep:
        self.most_rows = max(self.most_rows, len(plan.prefill) + len(plan.decode))
        return super().launch(plan)


@pytest.mark.parametrize(("skill", "places"), [("detect", "objects"), ("point", "points")])
async def test_a_call_with_several_names_gives_what_one_call_each_gives(skill: str, places: str) -> None:
    async with fake_engine() as engine:
        alone = [await engine.run(skill, image=PICTURE, object=name, **FEW) for name in NAMES]
        together = await engine.run(skill, image=PICTURE, object=NAMES, request_id="mine", **FEW)
    expected = [
        {**place, "label": name} for name, one in zip(NAMES, alone, strict=True) for place in one.output[places]
    ]
    assert together.output == {places: expected, "image": {"width": 40, "height": 20}}
    assert len({place["label"] for place in expected}) > 1
    assert (together.request_id, together.skill) == ("mine", skill)
    for count in ("input_tokens", "output_tokens"):
        assert getattr(together.metrics, count) == sum(getattr(one.metrics, count) for one in alone)


async def test_outlines_of_several_names_are_segments() -> None:
    async with fake_engine() as engine:
        alone = [await engine.segment(PICTURE, name, max_tokens=12) for name in NAMES]
        together = await engine.segment(PICTURE, NAMES, max_tokens=12)
    assert together.output.keys() == {"segments", "image"}
    for name, one, segment in zip(NAMES, alone, together.output["segments"], strict=True):
        assert segment == {**one.output["segments"][0], "path": one.output["path"], "label": name}


async def test_the_picture_of_a_call_is_computed_once() -> None:
    runtime = CountingRuntime()
    async with fake_engine(runtime) as engine:
        result = await engine.detect(PICTURE, [f"thing {number}" for number in range(20)], max_objects=40)
        picture = engine.num_image_positions + 1
        words = result.metrics.input_tokens - 20 * picture
        assert runtime.num_positions_computed <= picture + words + result.metrics.output_tokens
    assert runtime.most_rows > 1


async def test_no_more_requests_of_a_call_run_than_the_engine_has_rows_for() -> None:
    runtime = CountingRuntime(max_batch_size=2)
    async with fake_engine(runtime, max_queue_size=1) as engine:
        result = await engine.detect(PICTURE, [f"thing {number}" for number in range(9)], max_objects=1)
    assert {place["label"] for place in result.output["objects"]} <= {f"thing {number}" for number in range(9)}
    assert runtime.most_rows == 2


async def test_pieces_of_a_stream_say_whose_they_are() -> None:
    async with fake_engine() as engine:
        stream = await engine.detect(PICTURE, NAMES, stream=True, **FEW)
        chunks = [dict(chunk.data or {}) async for chunk in stream]
        objects = (await stream.result()).output["objects"]
        assert sorted(chunks, key=str) == sorted(objects, key=str) != []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"object": ["gear", "gear"]}, r"^object\[1\]: 'gear' is given twice"),
        ({"object": ["gear", " "]}, r"^object\[1\]: is empty"),
        ({"object": ["gear", 7]}, r"^object\[1\]: must be text"),
        ({"object": []}, r"^object: must hold 1 to 64 names \(got 0\)"),
        ({"object": [str(number) for number in range(65)]}, r"^object: must hold 1 to 64 names \(got 65\)"),
        ({"object": NAMES, "max_tokens": 0}, r"^max_tokens: "),
        ({"object": NAMES, "colour": "red"}, r"^colour: is not a field of segment"),
        ({"object": NAMES, "image": b"none"}, r"^image: "),
        ({"object": NAMES, "image": None}, r"^image: is required"),
        ({"object": "gear", "instances": "some"}, r'^instances: must be "one" or "all"'),
        ({"instances": "all"}, r"^object: is required"),
        ({"object": "gear", "instances": "all", "spatial_refs": [[0.5, 0.5]]}, r"^spatial_refs: .* give one of them"),
        ({"object": "gear", "instances": "all", "max_objects": 3}, r"^max_objects: does not limit segment"),
    ],
)
async def test_what_is_wrong_with_a_call_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    async with fake_engine() as engine:
        with pytest.raises(RequestError, match=message):
            await engine.run("segment", stream=True, **{"image": PICTURE, **fields})
        assert engine.num_requests == 0
        assert "mine" not in engine.taken_ids


async def test_only_outlines_have_instances() -> None:
    async with fake_engine() as engine:
        with pytest.raises(RequestError, match="instances: is not a field of detect"):
            await engine.detect(PICTURE, "gear", instances="all")


async def settled(engine: InferenceEngine) -> None:
    while engine.num_requests or "mine" in engine.taken_ids:
        await asyncio.sleep(0.001)


async def test_cancelling_a_call_cancels_all_of_it() -> None:
    async with fake_engine(CountingRuntime(max_batch_size=2)) as engine:
        stream = await engine.detect(PICTURE, NAMES, max_objects=300, stream=True, request_id="mine")
        with pytest.raises(RequestError, match="'mine' is in use"):
            await engine.query(question="hello", request_id="mine")
        await anext(stream)
        assert engine.has_begun("mine")
        stream.cancel()
        with pytest.raises(RequestCancelled):
            await stream.result()
        await settled(engine)
        again = await engine.detect(PICTURE, NAMES, request_id="mine", **FEW)
        assert again.request_id == "mine"


async def test_a_reason_to_end_a_call_is_what_its_caller_gets() -> None:
    async with fake_engine() as engine:
        stream = await engine.detect(PICTURE, NAMES, max_objects=300, stream=True, request_id="mine")
        engine.cancel("mine", QueueFull("no time left"))
        with pytest.raises(QueueFull, match="no time left"):
            await stream.result()
        await settled(engine)


async def test_every_name_counts_in_the_queue() -> None:
    async with fake_engine(CountingRuntime(max_batch_size=4), max_queue_size=1) as engine:
        others = [
            await engine.query(question="hello", stream=True, max_tokens=500, min_tokens=500, reasoning=False)
            for _ in range(3)
        ]
        with pytest.raises(QueueFull):
            await engine.detect(PICTURE, NAMES, request_id="mine")
        assert "mine" not in engine.taken_ids
        for other in others:
            other.cancel()
        await settled(engine)


async def test_a_picture_that_cannot_be_encoded_fails_the_call() -> None:
    runtime = CountingRuntime()
    runtime.failing_digests[PICTURE.digest] = NumericalError("bad picture")
    async with fake_engine(runtime) as engine:
        with pytest.raises(NumericalError, match="bad picture"):
            await engine.detect(PICTURE, NAMES, request_id="mine")
        await settled(engine)


@pytest.mark.parametrize("drain", [True, False])
async def test_a_call_is_answered_whole_before_an_engine_ends_or_told_of_its_end(drain: bool) -> None:
    engine = fake_engine(CountingRuntime(max_batch_size=1))
    stream = await engine.detect(PICTURE, NAMES, max_objects=30, stream=True)
    await engine.shutdown(drain=drain)
    if drain:
        assert {place["label"] for place in (await stream.result()).output["objects"]} <= {*NAMES}
    else:
        with pytest.raises(EngineStopped):
            await stream.result()
