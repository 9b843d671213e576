"""Every runtime keeps the contract: the fake one that scheduling is tested on, and the torch one that serves."""

from __future__ import annotations

from typing import Any

import pytest

from kestrel.grammar import free_text
from kestrel.request import FinishReason, SamplingParams
from kestrel.runtime.contract import (
    DecodeRow,
    PageCopy,
    PageWrite,
    PrefillChunk,
    RowStart,
    Runtime,
    RuntimeLimits,
    StepPlan,
)
from kestrel.runtime.executor import Executor
from kestrel.runtime.fake import FakeRuntime
from kestrel.tokens import ImageSpan, TextToken
from tests.moondream.goldens import golden
from tests.runtime.paged import RecordingDecoder

LIMITS = RuntimeLimits(
    max_batch_size=3, max_seq_length=64, num_pages=40, page_size=4, max_prefill_tokens=32, steps_in_flight=1
)
NEVER_SAMPLED = 319
GRAMMAR = free_text(NEVER_SAMPLED)


@pytest.fixture(params=["fake", "torch"])
def runtime(request: pytest.FixtureRequest) -> Runtime[Any]:
    if request.param == "fake":
        return FakeRuntime(LIMITS, vocab_size=320)
    return Executor(RecordingDecoder(golden("md2").model), LIMITS)


def start(row: int, budget: int = 50) -> RowStart:
    return RowStart(row, GRAMMAR, SamplingParams(max_new_tokens=budget), max_total_tokens=50)


def writes(row: int, *pages: int) -> list[PageWrite]:
    return [PageWrite(row, index, page) for index, page in enumerate(pages)]


def prefill(row: int, ids: list[int], position: int = 0, samples: bool = True) -> PrefillChunk:
    return PrefillChunk(row, position, [TextToken(i) for i in ids], len(ids), samples)


def run(runtime: Runtime[Any], plan: StepPlan):
    return runtime.collect(runtime.launch(plan))


def test_limits_are_those_given(runtime: Runtime[Any]) -> None:
    assert runtime.limits == LIMITS


def test_only_sampling_work_yields_rows_and_each_once(runtime: Runtime[Any]) -> None:
    plan = StepPlan(0, [start(0), start(2)], writes(0, 5, 6) + writes(2, 7), [])
    plan.prefill = [prefill(0, [30, 31, 32], samples=False), prefill(2, [40, 41])]
    output = run(runtime, plan)
    assert output.step_id == 0
    assert [row.row for row in output.rows] == [2]
    assert not output.failures


def test_a_step_may_be_launched_before_the_last_one_is_collected(runtime: Runtime[Any]) -> None:
    first = runtime.launch(StepPlan(0, [start(1)], writes(1, 3, 4), [], [prefill(1, [30, 31])]))
    second = runtime.launch(StepPlan(1, decode=[DecodeRow(1, 2)]))
    tokens = [runtime.collect(first).rows[0].token, runtime.collect(second).rows[0].token]

    fresh_first = run(runtime, StepPlan(2, [start(0)], writes(0, 8, 9), [], [prefill(0, [30, 31])]))
    fresh_second = run(runtime, StepPlan(3, decode=[DecodeRow(0, 2)]))
    assert tokens == [fresh_first.rows[0].token, fresh_second.rows[0].token]


def test_chunks_and_copied_pages_change_nothing(runtime: Runtime[Any]) -> None:
    ids = [30, 31, 32, 33, 34, 35]
    whole = run(runtime, StepPlan(0, [start(0)], writes(0, 1, 2), [], [prefill(0, ids)])).rows[0].token
    run(runtime, StepPlan(1, [start(1)], writes(1, 10, 11), [], [prefill(1, ids[:2], samples=False)]))
    chunked = run(runtime, StepPlan(2, prefill=[prefill(1, ids[2:], position=2)])).rows[0].token
    assert chunked == whole
    # Row 2 shares the full page 1 and copies the partly filled page 2, as after a prefix hit of five positions.
    plan = StepPlan(3, [start(2)], writes(2, 1, 20), [PageCopy(2, 20)], [prefill(2, ids[5:], position=5)])
    assert run(runtime, plan).rows[0].token == whole


def test_a_row_continues_after_a_restart_as_if_nothing_happened(runtime: Runtime[Any]) -> None:
    first = run(runtime, StepPlan(0, [start(0)], writes(0, 1, 2), [], [prefill(0, [30, 31])])).rows[0]
    second = run(runtime, StepPlan(1, decode=[DecodeRow(0, 2)])).rows[0]
    assert first.token is not None
    resumed = RowStart(
        1, GRAMMAR, SamplingParams(max_new_tokens=50), 50, first.grammar_state, first.phase_spent, num_generated=1
    )
    chunk = PrefillChunk(1, 0, [TextToken(30), TextToken(31), first.token], 3, samples=True)
    again = run(runtime, StepPlan(2, [resumed], writes(1, 3, 4), [], [chunk])).rows[0]
    assert (again.token, again.grammar_state, again.phase_spent) == (
        second.token,
        second.grammar_state,
        second.phase_spent,
    )


def test_budgets_end_a_row_with_length(runtime: Runtime[Any]) -> None:
    plan = StepPlan(0, [start(0, budget=1)], writes(0, 1), [], [prefill(0, [30, 31])])
    row = run(runtime, plan).rows[0]
    assert row.token is not None
    assert row.finish is FinishReason.LENGTH


def test_a_picture_without_pixels_fails_its_row_alone(runtime: Runtime[Any]) -> None:
    span = ImageSpan("abcd" * 8, 4)
    if isinstance(runtime, FakeRuntime):
        runtime.failing_digests[span.digest] = KeyError(span.digest)
    plan = StepPlan(0, [start(0), start(1)], writes(0, 1, 2) + writes(1, 3), [])
    plan.prefill = [PrefillChunk(0, 0, [span], 4, samples=False), prefill(0, [30], position=4), prefill(1, [30, 31])]
    output = run(runtime, plan)
    assert set(output.failures) == {0}
    assert [row.row for row in output.rows] == [1]


def test_a_mask_bounds_its_row_together_with_the_grammar_and_no_other_row(runtime: Runtime[Any]) -> None:
    def first_ids(step: int, masks: dict[int, bytes]) -> list[int]:
        starts = [RowStart(row, GRAMMAR, SamplingParams(max_new_tokens=9), max_total_tokens=50) for row in range(3)]
        plan = StepPlan(step, starts, writes(0, 1) + writes(1, 2) + writes(2, 3), masks=masks)
        plan.prefill = [prefill(row, [30 + row, 31]) for row in range(3)]
        tokens = [row.token for row in run(runtime, plan).rows]
        assert all(isinstance(token, TextToken) for token in tokens)
        return [token.id for token in tokens if isinstance(token, TextToken)]

    free = first_ids(0, {})
    allowed = [token_id for token_id in (41, 200, 318) if token_id != free[1]]
    masks = {1: sum(1 << token_id for token_id in allowed).to_bytes(40, "little"), 2: (1 << 77).to_bytes(40, "little")}
    bound = first_ids(1, masks)
    assert bound[0] == free[0]
    assert bound[1] in allowed
    assert bound[2] == 77
    assert first_ids(2, {}) == free, "a mask outlived its step"


def test_a_mask_with_the_end_alone_ends_its_row(runtime: Runtime[Any]) -> None:
    plan = StepPlan(0, [start(0)], writes(0, 1), [], [prefill(0, [30, 31])])
    plan.masks[0] = (1 << NEVER_SAMPLED).to_bytes(40, "little")
    row = run(runtime, plan).rows[0]
    assert row.token is None
    assert row.finish is FinishReason.STOP
