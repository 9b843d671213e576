"""Which decode steps are captured, and when. Real captures are tested on a GPU."""

from __future__ import annotations

import copy

import pytest
import torch

from kestrel.kernels.ops import PLAIN
from kestrel.models.contract import DecoderModel
from kestrel.runtime.attention import PagedKVCache
from kestrel.runtime.contract import DecodeRow
from kestrel.runtime.decode import DecodeGraphs, DecodeParts, goes_on
from kestrel.runtime.executor import FastSteps
from kestrel.runtime.rows import RowTable
from kestrel.runtime.sampler import Sampled
from tests.exhaustive import sweep
from tests.moondream.coarse import coarse
from tests.runtime.paged import Paged, RecordingDecoder, paged_in_steps
from tests.runtime.repeating_pool import RepeatingPool
from tests.runtime.test_paged_equality import all_skills, dense


def captured(family: str, pool: RepeatingPool) -> tuple[Paged, DecodeGraphs]:
    decoder = RecordingDecoder(copy.deepcopy(coarse(family).model))
    decoder.fuse(PLAIN)
    made: list[DecodeGraphs] = []

    def make(model: DecoderModel, kv: PagedKVCache, table: RowTable) -> FastSteps:
        made.append(DecodeGraphs(model, kv, table, PLAIN, (1, 2, 4, 8, 16), pool))
        return FastSteps(made[0])

    return paged_in_steps(decoder, make, vision_batch_crops=20), made[0]


@sweep("family", ["md2", "md3"], always=["md3"])
def test_steps_run_once_before_they_are_captured_and_give_what_the_dense_loop_gives(family: str) -> None:
    g, pool = coarse(family), RepeatingPool()
    engine, graphs = captured(family, pool)
    expected = dense(g, all_skills(g, "a", "small"))
    for round_ in range(3):
        found = engine.run(*all_skills(g, "a", "small"))
        assert found == expected, round_
    assert pool.has_run
    assert all(pool.has_run)
    assert set(graphs._steps) <= graphs._steps_run
    assert set(graphs._samplings) <= graphs._samplings_run


def test_inputs_are_sent_where_rows_do_not_just_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    g, pool = coarse("md2"), RepeatingPool()
    engine, graphs = captured("md2", pool)
    asked = all_skills(g, "a", "small")
    crowds = [asked, *([one] for one in asked)]
    for _ in range(2):  # until all is captured
        for some in crowds:
            engine.run(*some)
    ran: list[tuple[list[DecodeRow], DecodeParts]] = []
    sent: list[list[DecodeRow]] = []
    run, inputs = graphs.run, graphs.inputs

    def note_run(decode: list[DecodeRow], parts: DecodeParts) -> Sampled:
        ran.append((decode, parts))
        return run(decode, parts)

    def note_inputs(decode: list[DecodeRow]) -> torch.Tensor:
        sent.append(decode)
        return inputs(decode)

    monkeypatch.setattr(graphs, "run", note_run)
    monkeypatch.setattr(graphs, "inputs", note_inputs)
    for some in crowds:
        assert engine.run(*some) == dense(g, some)
    assert 0 < len(sent) < len(ran)
    before: dict[object, list[DecodeRow]] = {}
    for decode, parts in ran:
        key = graphs.size_for(len(decode)), parts
        was_sent, is_full = any(decode is one for one in sent), len(decode) == key[0]
        assert was_sent is not (is_full and goes_on(decode, before.get(key, [])))
        before[key] = decode


def test_rows_go_on_where_each_is_one_position_further() -> None:
    before = [DecodeRow(0, 7), DecodeRow(3, 5)]
    assert goes_on([DecodeRow(0, 8), DecodeRow(3, 6)], before)
    for other in (
        [DecodeRow(0, 8), DecodeRow(2, 6)],
        [DecodeRow(0, 8), DecodeRow(3, 5)],
        [DecodeRow(0, 9), DecodeRow(3, 7)],
        [DecodeRow(3, 6), DecodeRow(0, 8)],
        [DecodeRow(0, 8)],
        [],
    ):
        assert not goes_on(other, before)
    assert not goes_on([DecodeRow(0, 8)], [])


def test_what_is_prepared_is_tried_out_first() -> None:
    pool = RepeatingPool()
    _, graphs = captured("md2", pool)
    with torch.inference_mode():
        graphs.prepare()
    assert pool.has_run == [False] * (2 * 2 * 5)


@pytest.mark.exhaustive
def test_after_tables_have_moved_everything_runs_again_before_it_is_captured() -> None:
    """Wider tables need other kernels, and inside a capture none can be compiled."""
    g, pool = coarse("md2"), RepeatingPool()
    engine, graphs = captured("md2", pool)
    asked = all_skills(g, "a", "small")
    for some in (asked, asked, *[asked[:1]] * 3):
        engine.run(*some)
    assert graphs._steps
    assert graphs._ran
    graphs._version = -1
    with torch.inference_mode():
        graphs._drop_outdated()
    assert (graphs._steps, graphs._samplings, graphs._steps_run, graphs._samplings_run) == ({}, {}, set(), set())
    assert graphs._ran == {}, "a new capture has inputs of its own"


@pytest.mark.exhaustive
def test_odd_mixtures_are_launched_once_enough_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kestrel.runtime.decode.MAX_CAPTURED", 2)
    g, pool = coarse("md2"), RepeatingPool()
    engine, graphs = captured("md2", pool)
    expected = engine.run(*all_skills(g, "a", "small"))
    for _ in range(2):
        assert engine.run(*all_skills(g, "a", "small")) == expected
    assert len(graphs._steps) == 2 < len(graphs._steps_run)
