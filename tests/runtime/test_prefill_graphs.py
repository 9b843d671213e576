"""Prefill in captured forms gives what the dense loop gives; the capture itself is tested on a GPU."""

from __future__ import annotations

import copy

import pytest
import torch

from kestrel.cache import CacheManager
from kestrel.kernels.ops import PLAIN
from kestrel.models.contract import DecoderModel
from kestrel.runtime import prefill_graphs
from kestrel.runtime.attention import PagedKVCache
from kestrel.runtime.contract import RuntimeLimits
from kestrel.runtime.decode import FixedDecode
from kestrel.runtime.executor import Executor, FastSteps
from kestrel.runtime.pictures import VisionGraphs
from kestrel.runtime.prefill_graphs import PrefillForm, PrefillGraphs
from kestrel.runtime.rows import RowTable
from kestrel.scheduler import GenerationScheduler
from tests.exhaustive import sweep
from tests.moondream.coarse import coarse
from tests.moondream.goldens import Golden
from tests.runtime.paged import Case, Paged, RecordingDecoder
from tests.runtime.repeating_pool import RepeatingPool
from tests.runtime.test_paged_equality import all_skills, dense


def captured(family: str, pool: RepeatingPool, max_prefill_tokens: int) -> tuple[Paged, PrefillGraphs]:
    decoder = RecordingDecoder(copy.deepcopy(coarse(family).model))
    decoder.fuse(PLAIN)
    limits = RuntimeLimits(
        max_batch_size=16,
        max_seq_length=decoder.shape.max_context,
        num_pages=900,
        page_size=16,
        max_prefill_tokens=max_prefill_tokens,
        steps_in_flight=0,
    )

    made: list[PrefillGraphs] = []

    def make(model: DecoderModel, kv: PagedKVCache, table: RowTable) -> FastSteps:
        prefill = PrefillGraphs(model, kv, table, PLAIN, max_prefill_tokens, pool)
        made.append(prefill)
        return FastSteps(FixedDecode(model, kv, table, PLAIN, (1, 3, 8, 16)), prefill)

    with torch.inference_mode():
        vision = VisionGraphs(decoder.vision, 20, pool)
        runtime = Executor(
            decoder, limits, vision_batch_crops=20, make_fast_steps=make, vision_graphs=vision, by_kernels=True
        )
    return Paged(GenerationScheduler(runtime, CacheManager(limits.num_pages, 16, True)), decoder), made[0]


@sweep(("family", "max_prefill_tokens"), [("md2", 2048), ("md3", 100)], always=[("md3", 100)])
def test_every_skill_equals_the_dense_loop(family: str, max_prefill_tokens: int) -> None:
    g, pool = coarse(family), RepeatingPool()
    engine, graphs = captured(family, pool, max_prefill_tokens)
    expected = untagged(dense(g, crowd(g, "a")))
    for tag in ("a", "b", "c"):
        assert untagged(engine.run(*crowd(g, tag))) == expected, tag
    assert graphs._captured, "forms that come up again are captured"
    assert pool.has_run == [True] * len(graphs._captured), "each form once, after it has run; pictures came up once"


def crowd(g: Golden, tag: str) -> list[Case]:
    return all_skills(g, f"{tag}1", "small") + all_skills(g, f"{tag}2", "multi")[:2]


def untagged(answers: dict[str, list]) -> dict[str, list]:
    return {name[1:]: tokens for name, tokens in answers.items()}


def test_a_form_is_captured_when_it_comes_up_again_and_the_usual_ones_at_the_start() -> None:
    pool = RepeatingPool()
    _, graphs = captured("md2", pool, 2048)
    form = PrefillForm(num_positions=320, num_long=1, num_short=0, longest=384, wants_all=False, is_adapted=False)
    with torch.inference_mode():
        graphs._capture_if_worth_it(form)
        assert pool.has_run == []
        graphs._has_run.add(form)
        graphs._capture_if_worth_it(form)
        graphs._capture_if_worth_it(form)
        assert pool.has_run == [True]
        graphs.prepare()
    assert pool.has_run == [True, False, False, False]
    assert [form.num_positions for form in graphs._captured] == [320, 2048, 64, 192], "a full step goes first"


@pytest.mark.exhaustive
def test_while_the_gpu_waits_a_step_runs_in_a_captured_form_that_holds_it_and_then_in_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill_graphs, "PATIENCE", 1)
    g, pool = coarse("md2"), RepeatingPool()
    engine, graphs = captured("md2", pool, 2048)

    def two(tag: str) -> list[Case]:
        return all_skills(g, f"{tag}1", "small")[:1] + all_skills(g, f"{tag}2", "multi")[:1]

    with torch.inference_mode():
        graphs.prepare()
    usual, expected = list(graphs._captured), untagged(dense(g, two("a")))
    pool.idle = True
    # Pictures with questions are held; once pictures are known, questions alone are held, launched, captured.
    for tag, has_more in (("a", False), ("b", False), ("c", False), ("d", True)):
        assert untagged(engine.run(*two(tag))) == expected, tag
        assert (len(graphs._captured) > len(usual)) == has_more, tag


@pytest.mark.exhaustive
def test_the_smallest_form_with_room_for_all_of_a_step_is_taken() -> None:
    pool = RepeatingPool()
    _, graphs = captured("md2", pool, 2048)
    small, large, of_all = (
        PrefillForm(num_positions, num_long, 4, longest=768, wants_all=wants_all, is_adapted=False)
        for num_positions, num_long, wants_all in ((768, 1, False), (2048, 2, False), (2048, 2, True))
    )
    asked = {
        small: PrefillForm(704, 1, 1, longest=512, wants_all=False, is_adapted=False),
        large: PrefillForm(704, 2, 1, longest=512, wants_all=False, is_adapted=False),
    }
    with torch.inference_mode():
        for form in (of_all, large, small):
            graphs._captured[form] = graphs._capture(form)
    assert all(graphs._held_by(form) == form for form in asked.values()), "while the GPU is at work"
    pool.idle = True
    assert {graphs._held_by(form): form for form in asked.values()} == asked
    longer = PrefillForm(704, 1, 1, longest=1024, wants_all=False, is_adapted=False)
    assert graphs._held_by(longer) == longer
