"""Adapters in captured forms: mixed batches give what each request gives alone; the capture itself needs a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kestrel.kernels.ops import PLAIN
from kestrel.models.adapting import SingleAdapter
from kestrel.models.contract import Adapt, DecoderModel
from kestrel.runtime.contract import AdapterLoad
from kestrel.runtime.executor import FastSteps
from kestrel.runtime.fixed_decode import FixedDecode
from kestrel.runtime.kv_cache import PagedKVCache
from kestrel.runtime.prefill_graphs import PrefillGraphs
from kestrel.runtime.rows import RowTable
from tests.moondream.coarse import coarse
from tests.runtime.adapted import (
    ValuesAlone,
    adapted_text,
    adapters,
    crowd,
    decoder_and_slots,
    each_alone,
    loaded_slots,
    serving,
    untagged,
)
from tests.runtime.paged import Paged, RecordingDecoder
from tests.runtime.repeating_pool import RepeatingPool


def captured(family: str, pool: RepeatingPool, num_slots: int, max_prefill_tokens: int = 2048) -> Paged:
    decoder, slots = decoder_and_slots(family, "cpu", num_slots)
    decoder.fuse(PLAIN)
    adapting = slots if decoder.can_adapt_on_device else None

    def make(model: DecoderModel, kv: PagedKVCache, table: RowTable) -> FastSteps:
        decode = FixedDecode(model, kv, table, PLAIN, (1, 3, 8, 16), adapting)
        return FastSteps(decode, PrefillGraphs(model, kv, table, PLAIN, max_prefill_tokens, pool, adapting))

    return serving(decoder, slots, make, max_prefill_tokens)


@pytest.fixture
def eager_adapts(monkeypatch: pytest.MonkeyPatch) -> list[Adapt]:
    """Every `Adapt` that the plain model was given."""
    seen: list[Adapt] = []
    forward = RecordingDecoder.forward

    def noted(self: RecordingDecoder, x: Any, positions: Any, attend: Any, adapt: Adapt | None = None) -> Any:
        if adapt is not None:
            seen.append(adapt)
        return forward(self, x, positions, attend, adapt)

    monkeypatch.setattr(RecordingDecoder, "forward", noted)
    return seen


@pytest.mark.parametrize("num_slots", [5, 2])
def test_a_mixed_crowd_is_told_what_each_is_told_alone(num_slots: int, eager_adapts: list[Adapt]) -> None:
    cases, pool = crowd("md2", "x"), RepeatingPool()
    expected = each_alone("md2", cases)
    engine = captured("md2", pool, num_slots)
    assert engine.run(*cases) == expected
    assert eager_adapts == [], "no step left the captured forms"
    captures = pool.num_captures
    again = engine.run(*reversed(crowd("md2", "again")))
    assert untagged(again) == untagged(expected)
    assert pool.num_captures - captures <= 3, "other adapters in the slots need no other capture"


def test_pictures_too_long_for_a_captured_form_run_as_usual_and_their_questions_in_one(
    eager_adapts: list[Adapt],
) -> None:
    cases, pool = crowd("md2", "x"), RepeatingPool()
    engine, expected = captured("md2", pool, 5, max_prefill_tokens=100), each_alone("md2", cases)
    assert engine.run(*cases) == expected
    assert eager_adapts
    for tag in ("again", "once more"):
        assert untagged(engine.run(*crowd("md2", tag))) == untagged(expected)
    assert pool.num_captures > 1, "forms that come up again are captured"


def test_experts_are_adapted_by_the_plain_model(eager_adapts: list[Adapt]) -> None:
    cases = crowd("md3", "x")
    assert captured("md3", RepeatingPool(), 5).run(*cases) == each_alone("md3", cases)
    assert eager_adapts


@pytest.mark.parametrize("num_rows", [1, 7, 16, 40])
@torch.inference_mode()
def test_positions_of_the_base_keep_their_bits_and_the_others_equal_each_adapter_alone(num_rows: int) -> None:
    text, plain, slots = adapted_text(PLAIN), coarse("md2").model.text, loaded_slots()
    owners = [(n * 5) % 7 % 6 - 1 for n in range(num_rows)]
    x_TD, positions = plain.embed(torch.arange(20, 20 + num_rows)), torch.arange(num_rows)
    together = text.forward_adapted(x_TD, positions, ValuesAlone(num_rows), slots.deltas(torch.tensor(owners)))
    base = text.forward(x_TD, positions, ValuesAlone(num_rows))
    without = [n for n, owner in enumerate(owners) if owner < 0]
    assert torch.equal(together[without], base[without])
    for slot, adapter in enumerate(adapters("md2").values()):
        at = [n for n, owner in enumerate(owners) if owner == slot]
        alone = plain(x_TD, positions, own_values, SingleAdapter(adapter))
        torch.testing.assert_close(together[at], alone[at], rtol=1e-5, atol=1e-4)
        assert not at or not torch.allclose(together[at], base[at], atol=1e-3)


@torch.inference_mode()
def test_a_slot_filled_anew_changes_what_the_same_tensors_give() -> None:
    text, plain, slots = adapted_text(PLAIN), coarse("md2").model.text, loaded_slots()
    deltas = slots.deltas(torch.full((5,), 2))
    x_TD, positions = plain.embed(torch.arange(20, 25)), torch.arange(5)
    for name in ("wide", "of norm", "narrow", "one matrix"):
        adapter = adapters("md2")[name]
        slots.load(AdapterLoad(2, name, adapter))
        got = text.forward_adapted(x_TD, positions, ValuesAlone(5), deltas)
        alone = plain(x_TD, positions, own_values, SingleAdapter(adapter))
        torch.testing.assert_close(got, alone, rtol=1e-5, atol=1e-4)


def own_values(layer: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> Tensor:
    return v_THD


def test_a_step_of_experts_has_no_deltas_on_the_device() -> None:
    _, slots = decoder_and_slots("md3", "cpu", num_slots=1)
    with pytest.raises(AssertionError, match="experts"):
        slots.deltas(torch.zeros(1, dtype=torch.int64))
