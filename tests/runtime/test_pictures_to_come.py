"""Pictures encoded before their requests have a row: the same embeddings and answers, each waited for alone."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kestrel.config import RuntimeConfig
from kestrel.models.contract import DecoderShape
from kestrel.moondream.decoder import MoondreamDecoder
from kestrel.runtime import bring_up
from kestrel.runtime.bring_up import MOST_ROWS_AHEAD, embedding_bytes, measured_steps, pictures_ahead
from kestrel.runtime.contract import StepPlan, WaitingPicture
from kestrel.runtime.device import SideStream
from kestrel.runtime.memory import WorkingMemory
from kestrel.runtime.pictures import PicturesToCome
from tests.moondream.coarse import coarse
from tests.moondream.goldens import golden
from tests.runtime.paged import Paged, noted_pictures_ahead, paged
from tests.runtime.test_paged_equality import all_skills, dense
from tests.runtime.test_picture_slices import MULTI, chunk, encoder, other, out_of_memory

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def order(image: Any, digest: str | None = None) -> StepPlan:
    return StepPlan(0, picture_ahead=WaitingPicture(digest or image.digest, image))


def to_come() -> PicturesToCome:
    return PicturesToCome(encoder(), SideStream(CPU))


# ---------------------------------------------------------------------- embeddings and answers


@torch.inference_mode()
def test_a_picture_ahead_has_the_embedding_of_its_prefill() -> None:
    whole = encoder().encode([chunk(MULTI)])[0][MULTI.digest]
    pictures = to_come()
    pictures.follow(order(MULTI))
    assert pictures.has_encoded(MULTI.digest)
    taken = pictures.take([MULTI.digest, "unknown"])
    torch.testing.assert_close(taken[MULTI.digest].tensor, whole, rtol=0.0, atol=2e-5)
    assert not pictures.has_encoded(MULTI.digest), "what was taken is not kept"


@torch.inference_mode()
def test_it_is_kept_until_it_is_unwanted() -> None:
    pictures = to_come()
    images = [other(index) for index in range(MOST_ROWS_AHEAD)]
    for image in images:
        pictures.follow(order(image))
    assert all(pictures.has_encoded(image.digest) for image in images)
    pictures.follow(StepPlan(0, unwanted_pictures=[images[3].digest, "unknown"]))
    assert [pictures.has_encoded(image.digest) for image in images].count(False) == 1
    assert not pictures.has_encoded(images[3].digest)


@pytest.mark.parametrize("fault", [None, "memory"])
@torch.inference_mode()
def test_what_failed_ahead_counts_as_encoded_and_is_left_to_its_prefill(fault: str | None) -> None:
    pictures = to_come()
    if fault:
        pictures._encoder._vision.encode_crops = out_of_memory  # type: ignore[method-assign]
    pictures.follow(order(MULTI if fault else None, "feed"))
    assert pictures.has_encoded("feed")
    assert pictures.take(["feed"]) == {}
    assert not pictures.has_encoded("feed")


@pytest.mark.parametrize("settings", [{}, {"in_fixed_sizes": True, "is_fused": True}])
def test_answers_are_those_of_the_dense_loop(settings: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = noted_pictures_ahead(monkeypatch)
    g = golden("md2")
    cases = all_skills(g, "a", "small")[2:5] + all_skills(g, "b", "multi")[2:5]
    engine = paged(g.model, max_batch_size=1, pictures_ahead=1, steps_in_flight=1, **settings)
    first_ahead = next(iter(cases[-1].images))
    assert engine.run(*cases) == dense(g, cases)
    assert ahead == [first_ahead], "the others found their picture in the prefix cache"
    assert not keeps_any(engine)


def test_a_damaged_picture_fails_its_request_alone() -> None:
    g = golden("md2")
    good, bad, third = (
        all_skills(g, tag, picture)[2] for tag, picture in zip("abc", ["small", "multi", "small"], strict=True)
    )
    bad.images.clear()
    engine = paged(g.model, max_batch_size=1, pictures_ahead=1)
    final = engine.finish(good, bad, third)
    assert final[bad.name].error is not None
    assert final[good.name].error is None
    assert final[third.name].error is None
    assert not keeps_any(engine)


def keeps_any(engine: Paged) -> bool:
    runtime: Any = engine.scheduler._runtime
    return bool(runtime._to_come._kept)


# ---------------------------------------------------------------------- events, on a device that only takes notes


class NotedEvent:
    """Numbered in the order in which events are recorded."""

    numbers = itertools.count(1)
    is_over = False

    def record(self, stream: NotedStream) -> None:
        self.number = next(self.numbers)

    def query(self) -> bool:
        return self.is_over


@dataclass
class NotedStream:
    waited: list[int] = field(default_factory=list)
    readers: list[torch.Tensor] = field(default_factory=list)
    """What it may read although another stream's memory holds it."""

    def wait_event(self, event: NotedEvent) -> None:
        self.waited.append(event.number)

    def wait_stream(self, stream: NotedStream) -> None:
        """For whatever it has."""
        self.waited.append(next(NotedEvent.numbers))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> tuple[SideStream, NotedStream]:
    """The second one, and the main one."""
    main = NotedStream()
    monkeypatch.setattr(NotedEvent, "numbers", itertools.count(1))
    monkeypatch.setattr(torch.cuda, "Event", NotedEvent)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: NotedStream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: stream.readers.append(tensor))
    return SideStream(GPU), main


@torch.inference_mode()
def test_a_prefill_waits_for_its_own_picture_and_not_for_one_that_was_encoded_after_it(
    streams: tuple[SideStream, NotedStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, main = streams
    monkeypatch.setattr(NotedEvent, "is_over", True)
    pictures = PicturesToCome(encoder(), beside)
    first, second = other(0), other(1)
    pictures.follow(order(first))
    pictures.follow(order(second))
    taken = pictures.take([first.digest])
    beside.join(taken.values())
    assert main.waited == [1]
    assert [tensor is taken[first.digest].tensor for tensor in main.readers] == [True]
    beside.join(pictures.take([second.digest]).values())
    assert main.waited == [1, 2]
    beside.join([])
    assert main.waited == [1, 2], "a step without pictures waits for none"


@torch.inference_mode()
def test_while_one_is_being_encoded_no_other_is_begun_unless_its_row_has_come(
    streams: tuple[SideStream, NotedStream],
) -> None:
    pictures = PicturesToCome(encoder(), streams[0])
    pictures.follow(order(other(0)))
    pictures.follow(order(other(1)))
    assert not pictures.has_encoded(other(1).digest)
    pictures.take([other(0).digest])
    pictures.follow(order(other(1)))
    assert pictures.has_encoded(other(1).digest)


def test_pictures_of_a_step_share_an_event(streams: tuple[SideStream, NotedStream]) -> None:
    beside, main = streams
    beside.join(beside.made([torch.zeros(1), torch.zeros(1)]))
    assert set(main.waited) == {1}


# ---------------------------------------------------------------------- where, and how much memory


def shape(num_image_positions: int = 729) -> DecoderShape:
    return DecoderShape(2, 4, 8, 32, 100, 1024, num_image_positions)


@pytest.mark.parametrize("rows", [1, 4, MOST_ROWS_AHEAD])
def test_as_many_as_rows_on_a_gpu_with_few(rows: int) -> None:
    assert pictures_ahead(RuntimeConfig(max_batch_size=rows), shape(), GPU) == rows


def test_none_with_many_rows_on_a_cpu_for_a_text_model_or_with_several_ranks() -> None:
    few = RuntimeConfig(max_batch_size=4)
    assert pictures_ahead(RuntimeConfig(max_batch_size=MOST_ROWS_AHEAD + 1), shape(), GPU) == 0
    assert pictures_ahead(few, shape(), CPU) == 0
    assert pictures_ahead(few, shape(num_image_positions=0), GPU) == 0
    assert pictures_ahead(RuntimeConfig(max_batch_size=4, tensor_parallel_size=2), shape(), GPU) == 0


@torch.inference_mode()
def test_kept_pictures_are_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = MoondreamDecoder(coarse("md2").model)
    assert decoder.vision is not None
    [embedded] = decoder.vision.embed_images([decoder.vision.prepare_image(MULTI)])
    assert embedding_bytes(decoder) >= embedded.nbytes
    monkeypatch.setattr(bring_up, "measure_working_memory", lambda *_: WorkingMemory(0, 0, is_captured=False))
    path: Any = SimpleNamespace(kv_dtype=torch.float32, is_fused=False)

    def planned(num_pictures: int) -> int:
        monkeypatch.setattr(bring_up, "pictures_ahead", lambda *_: num_pictures)
        return measured_steps(decoder, RuntimeConfig(), path, is_captured=False).planned(1)

    assert planned(3) - planned(0) == 3 * embedding_bytes(decoder)
