"""Adapters in captured forms: mixed batches give what each request gives alone; the capture itself needs a GPU."""

from __future__ import annotations

import pytest
import torch

from kestrel.kernels.ops import PLAIN
from kestrel.models.contract import DecoderModel
from kestrel.runtime.adapter_slots import SlotAdapt
from kestrel.runtime.attention import PagedKVCache
from kestrel.runtime.contract import AdapterLoad
from kestrel.runtime.decode import FixedDecode
from kestrel.runtime.executor import Executor, FastSteps
from kestrel.runtime.prefill_graphs import PrefillGraphs
from kestrel.runtime.rows import RowTable
from tests.exhaustive import sweep
from tests.moondream.coarse import coarse
from tests.moondream.goldens import single_adapter
from tests.runtime.adapted import (
    ValuesAlone,
    adapters,
    crowd,
    decoder_and_slots,
    each_alone,
    fused_text,
    loaded_slots,
    serving,
    untagged,
)
from tests.runtime.paged import Paged
from tests.runtime.repeating_pool import RepeatingPool


def captured(
    family: str,
    pool: RepeatingPool,
    num_slots: int,
    max_prefill_tokens: int = 2048,
    made: list[PrefillGraphs] | None = None,
) -> Paged:
    decoder, slots = decoder_and_slots(family, "cpu", num_slots)
    decoder.fuse(PLAIN)

    def make(model: DecoderModel, kv: PagedKVCache, table: RowTable) -> FastSteps:
        decode = FixedDecode(model, kv, table, PLAIN, (1, 3, 8, 16), slots)
        prefill = PrefillGraphs(model, kv, table, PLAIN, max_prefill_tokens, pool, slots)
        if made is not None:
            made.append(prefill)
        return FastSteps(decode, prefill)

    return serving(decoder, slots, make, max_prefill_tokens)


@pytest.fixture
def usual_steps(monkeypatch: pytest.MonkeyPatch) -> list[SlotAdapt]:
    """The adapters of every step that left the captured forms."""
    seen: list[SlotAdapt] = []
    adapt = Executor._adapt

    def noted(self: Executor, rows: list[int]) -> SlotAdapt | None:
        found = adapt(self, rows)
        if found is not None:
            seen.append(found)
        return found

    monkeypatch.setattr(Executor, "_adapt", noted)
    return seen


@sweep(("family", "num_slots"), [("md2", 5), ("md2", 2), ("md3", 5), ("md3", 2)], always=[("md3", 2)])
def test_a_mixed_crowd_is_told_what_each_is_told_alone(
    family: str, num_slots: int, usual_steps: list[SlotAdapt]
) -> None:
    cases, pool = crowd(family, "x"), RepeatingPool()
    expected = each_alone(family, cases)
    engine = captured(family, pool, num_slots)
    assert engine.run(*cases) == expected
    assert usual_steps == [], "no step left the captured forms"
    captures = pool.num_captures
    again = engine.run(*reversed(crowd(family, "again")))
    assert untagged(again) == untagged(expected)
    assert pool.num_captures - captures <= 3, "other adapters in the slots need no other capture"


@sweep("answers", [False, True], always=[False])
def test_usual_forms_are_captured_for_adapted_steps_at_the_start_and_hold_a_first_crowd(
    answers: bool, usual_steps: list[SlotAdapt]
) -> None:
    made: list[PrefillGraphs] = []
    pool = RepeatingPool()
    pool.idle = True
    engine = captured("md2", pool, 5, max_prefill_tokens=256, made=made)
    with torch.inference_mode():
        made[0].prepare()
    usual = list(made[0]._captured)
    assert [form.is_adapted for form in usual] == [False] * 3 + [True] * 3
    if answers:
        cases = crowd("md2", "x")
        assert engine.run(*cases) == each_alone("md2", cases)
        assert list(made[0]._captured) == usual
        assert usual_steps == []


@pytest.mark.exhaustive
def test_pictures_too_long_for_a_captured_form_run_as_usual_and_their_questions_in_one(
    usual_steps: list[SlotAdapt],
) -> None:
    cases, pool = crowd("md2", "x"), RepeatingPool()
    engine, expected = captured("md2", pool, 5, max_prefill_tokens=100), each_alone("md2", cases)
    assert engine.run(*cases) == expected
    assert usual_steps
    for tag in ("again", "once more"):
        assert untagged(engine.run(*crowd("md2", tag))) == untagged(expected)
    assert pool.num_captures > 1, "forms that come up again are captured"


@pytest.mark.parametrize("family", ["md2", "md3"])
@sweep("num_rows", [1, 7, 16, 40], always=[7, 40])
@torch.inference_mode()
def test_positions_of_the_base_keep_their_bits_and_the_others_equal_each_adapter_alone(
    family: str, num_rows: int
) -> None:
    text, plain, slots = fused_text(PLAIN, family=family), coarse(family).model.text, loaded_slots(family=family)
    owners = [(n * 5) % 7 % 6 - 1 for n in range(num_rows)]
    x_TD, positions = plain.embed(torch.arange(20, 20 + num_rows)), torch.arange(num_rows)
    attend, apart = ValuesAlone(num_rows, family=family), ValuesAlone(num_rows, family=family, by_kernels=False)
    together = text(x_TD, positions, attend, SlotAdapt(slots, torch.tensor(owners), PLAIN))
    base = text(x_TD, positions, attend)
    without = [n for n, owner in enumerate(owners) if owner < 0]
    if family == "md2":
        assert torch.equal(together[without], base[without])
    else:  # which tokens an expert gets together decides the order of its sums
        torch.testing.assert_close(together[without], base[without], rtol=1e-5, atol=1e-4)
    for slot, adapter in enumerate(adapters(family).values()):
        at = [n for n, owner in enumerate(owners) if owner == slot]
        alone = plain(x_TD, positions, apart, single_adapter(family, adapter))
        torch.testing.assert_close(together[at], alone[at], rtol=1e-5, atol=1e-4)
        assert not at or not torch.allclose(together[at], base[at], atol=1e-3)


@torch.inference_mode()
def test_a_slot_filled_anew_changes_what_the_same_tensors_give() -> None:
    text, plain, slots = fused_text(PLAIN), coarse("md2").model.text, loaded_slots()
    adapt = SlotAdapt(slots, torch.full((5,), 2), PLAIN)
    x_TD, positions = plain.embed(torch.arange(20, 25)), torch.arange(5)
    for name in ("wide", "of norm", "narrow", "one matrix"):
        adapter = adapters("md2")[name]
        slots.load(AdapterLoad(2, name, adapter))
        got = text(x_TD, positions, ValuesAlone(5), adapt)
        alone = plain(x_TD, positions, ValuesAlone(5, by_kernels=False), single_adapter("md2", adapter))
        torch.testing.assert_close(got, alone, rtol=1e-5, atol=1e-4)
