"""Every runtime keeps the contract: the fake one that scheduling is tested on, the torch one that serves, and that one
behind a connection."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kestrel.errors import NumericalError
from kestrel.grammar import free_text
from kestrel.moondream.decoder import adapter_shape
from kestrel.request import FinishReason, PromptOutputs
from kestrel.runtime.adapter_slots import AdapterSlots
from kestrel.runtime.contract import (
    AdapterLoad,
    DecodeRow,
    PageCopy,
    PageWrite,
    PrefillChunk,
    RowOutput,
    RowStart,
    Runtime,
    RuntimeLimits,
    StepPlan,
)
from kestrel.runtime.executor import Executor
from kestrel.runtime.fake import FakeRuntime
from kestrel.runtime.process import ProcessRuntime
from kestrel.settings import SamplingParams
from kestrel.tokens import ContextItem, CoordToken, ImageSpan, TextToken, Token
from tests.moondream.goldens import golden, golden_adapter
from tests.runtime.paged import RecordingDecoder
from tests.runtime.process.other_end import connected_to

LIMITS = RuntimeLimits(
    max_batch_size=3,
    max_seq_length=64,
    num_pages=40,
    page_size=4,
    max_prefill_tokens=32,
    steps_in_flight=1,
    num_adapter_slots=2,
)
NEVER_SAMPLED = 319
GRAMMAR = free_text(NEVER_SAMPLED)


@pytest.fixture(params=["fake", "torch", "process"])
def runtime(request: pytest.FixtureRequest) -> Runtime[Any]:
    if request.param == "fake":
        return FakeRuntime(LIMITS, vocab_size=320)
    slots = AdapterSlots(adapter_shape(golden("md2").config.text), 2, 8, torch.device("cpu"), torch.float32)
    executor = Executor(RecordingDecoder(golden("md2").model), LIMITS, slots)
    return executor if request.param == "torch" else ProcessRuntime(connected_to(executor), LIMITS)


def start(row: int, budget: int = 50) -> RowStart:
    return RowStart(row, GRAMMAR, SamplingParams(max_new_tokens=budget), max_total_tokens=50)


def writes(row: int, *pages: int) -> list[PageWrite]:
    return [PageWrite(row, 0, pages)]


def prefill(row: int, ids: list[int], position: int = 0, samples: bool = True) -> PrefillChunk:
    return PrefillChunk(row, position, [TextToken(i) for i in ids], len(ids), samples)


def run(runtime: Runtime[Any], plan: StepPlan):
    return runtime.collect(runtime.launch(plan))


def test_limits_are_those_given(runtime: Runtime[Any]) -> None:
    beside = isinstance(runtime, ProcessRuntime)
    assert runtime.limits == replace(LIMITS, launch_waits=not beside)


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


OPTIONS: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": -2.0},
    "repetition": {"repetition_penalty": 1.8},
    "bias": {"logit_bias": ((60, 100.0), (61, 99.0)), "frequency_penalty": 2.0},
    "min_tokens": {"logit_bias": ((NEVER_SAMPLED, 100.0),), "min_tokens": 4},
}


def answer(runtime: Runtime[Any], start: RowStart, items: list[Token], first_page: int, step: int) -> list[RowOutput]:
    """Outputs of a row until it has ended or five steps have run; its pages begin at `first_page`."""
    chunk = PrefillChunk(start.row, 0, items, len(items), samples=True)
    pages = writes(start.row, *range(first_page, first_page + 4))
    rows = [run(runtime, StepPlan(step, [start], pages, [], [chunk])).rows[0]]
    while rows[-1].finish is None and len(rows) < 5:
        plan = StepPlan(step + len(rows), decode=[DecodeRow(start.row, len(items) + len(rows) - 1)])
        rows += run(runtime, plan).rows
    return rows


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_what_was_said_before_a_restart_still_counts(runtime: Runtime[Any], options: dict[str, Any]) -> None:
    sampling = SamplingParams(max_new_tokens=50, **options)
    prompt: list[Token] = [TextToken(30), TextToken(31)]
    whole = answer(runtime, RowStart(0, GRAMMAR, sampling, 50, prompt_ids=(30, 31)), prompt, 1, step=0)
    said = [row.token for row in whole[:3] if isinstance(row.token, TextToken)]
    assert len(said) == 3
    resumed = RowStart(
        row=1,
        grammar=GRAMMAR,
        sampling=sampling,
        max_total_tokens=50,
        grammar_state=whole[2].grammar_state,
        phase_spent=whole[2].phase_spent,
        num_generated=3,
        prompt_ids=(30, 31),
        generated_ids=tuple(token.id for token in said),
    )
    again = answer(runtime, resumed, [*prompt, *said], 6, step=10)
    assert [row.token for row in again[: len(whole) - 3]] == [row.token for row in whole[3:]]


@pytest.mark.parametrize("after", [{}, {"presence_penalty": 2.0}, {"repetition_penalty": 1.8}, {"min_tokens": 1}])
def test_a_row_leaves_nothing_to_the_next(runtime: Runtime[Any], after: dict[str, Any]) -> None:
    prompt: list[Token] = [TextToken(30), TextToken(31)]

    def begin(row: int, **options: Any) -> RowStart:
        return RowStart(row, GRAMMAR, SamplingParams(max_new_tokens=50, **options), 50, prompt_ids=(30, 31))

    fresh = [row.token for row in answer(runtime, begin(0, **after), prompt, 1, step=0)]
    said = {token.id for token in fresh if isinstance(token, TextToken)}
    before = RowStart(
        row=1,
        grammar=GRAMMAR,
        sampling=SamplingParams(
            presence_penalty=2.0,
            repetition_penalty=0.2,
            logit_bias=tuple((token_id, 100.0) for token_id in range(60, 65)),
            min_tokens=5,
            stop_token_ids=tuple(sorted(said)),
        ),
        max_total_tokens=50,
        prompt_ids=tuple(range(100, 300)),
        generated_ids=(*said, *range(40, 50)),
    )
    answer(runtime, before, prompt, 6, step=10)
    assert [row.token for row in answer(runtime, begin(1, **after), prompt, 6, step=20)] == fresh


def test_a_stop_id_ends_a_row_and_is_not_emitted(runtime: Runtime[Any]) -> None:
    prompt: list[Token] = [TextToken(30), TextToken(31)]
    first = answer(runtime, start(0), prompt, 1, step=0)[0].token
    assert isinstance(first, TextToken)
    sampling = SamplingParams(max_new_tokens=50, stop_token_ids=(200, first.id))
    row = answer(runtime, RowStart(1, GRAMMAR, sampling, 50), prompt, 6, step=10)[0]
    assert (row.token, row.finish) == (None, FinishReason.STOP)


def test_a_rows_own_id_lists_bound_what_it_samples(runtime: Runtime[Any]) -> None:
    prompt: list[Token] = [TextToken(30), TextToken(31)]
    free = answer(runtime, start(0), prompt, 1, step=0)[0].token
    assert isinstance(free, TextToken)
    both: list[dict[str, Any]] = [{"allowed_ids": (70, 71)}, {"suppressed_ids": (free.id, 200)}]
    for step, lists in enumerate(both, start=1):
        bound = RowStart(1, GRAMMAR, SamplingParams(max_new_tokens=50, **lists), 50)
        tokens = [row.token for row in answer(runtime, bound, prompt, 6, step=10 * step)]
        assert all(isinstance(token, TextToken) for token in tokens)
        ids = {token.id for token in tokens if isinstance(token, TextToken)}
        assert ids <= {70, 71} if "allowed_ids" in lists else ids.isdisjoint({free.id, 200})


def test_a_row_that_may_sample_nothing_fails_alone(runtime: Runtime[Any]) -> None:
    plan = StepPlan(0, [start(0), start(1)], writes(0, 1, 2) + writes(1, 3), [], masks={0: bytes(40)})
    plan.prefill = [prefill(0, [30, 31]), prefill(1, [30, 31])]
    flying = runtime.launch(plan)
    after = runtime.launch(StepPlan(1, decode=[DecodeRow(0, 2), DecodeRow(1, 2)]))
    output = runtime.collect(flying)
    assert isinstance(output.failures[0], NumericalError)
    assert [row.row for row in output.rows] == [1]
    assert 1 in [row.row for row in runtime.collect(after).rows]


def test_an_end_may_be_put_off_or_ignored(runtime: Runtime[Any]) -> None:
    prompt: list[Token] = [TextToken(30), TextToken(31)]
    first = answer(runtime, start(0), prompt, 1, step=0)[0].token
    assert isinstance(first, TextToken)
    ends_at_once = free_text(first.id)
    late = SamplingParams(max_new_tokens=50, min_tokens=2)
    never = SamplingParams(max_new_tokens=50, ignore_eos=True)
    assert answer(runtime, RowStart(1, ends_at_once, SamplingParams(), 50), prompt, 6, step=10)[0].token is None
    assert [r.token is None for r in answer(runtime, RowStart(1, ends_at_once, late, 50), prompt, 6, step=20)[:2]] == [
        False,
        False,
    ]
    tokens = [row.token for row in answer(runtime, RowStart(1, ends_at_once, never, 50), prompt, 6, step=30)]
    assert len(tokens) == 5
    assert first not in tokens
    assert None not in tokens


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


ASKED = PromptOutputs(logprobs=2, pool_from=1)


def asking(row: int, ids: list[int], position: int, following: int | None, samples: bool = False) -> PrefillChunk:
    next_item = None if following is None else TextToken(following)
    items = [TextToken(i) for i in ids]
    return PrefillChunk(row, position, items, len(ids), samples, prompt_outputs=ASKED, following=next_item)


def test_parts_of_a_prompt_add_up_to_the_whole(runtime: Runtime[Any]) -> None:
    plan = StepPlan(0, [start(0)], writes(0, 1, 2), [], [asking(0, [30, 31, 32, 33, 34], 0, None, samples=True)])
    output = run(runtime, plan)
    (whole,) = output.prompt_parts
    assert [row.row for row in output.rows] == [0]
    assert (whole.row, len(whole.scores), whole.num_pooled) == (0, 4, 4)

    first = runtime.launch(StepPlan(1, [start(1)], writes(1, 3, 4), [], [asking(1, [30, 31], 0, 32)]))
    rest = [asking(1, [32], 2, 33), prefill(2, [40, 41]), asking(1, [33, 34], 3, None)]
    second = runtime.launch(StepPlan(2, [start(2)], writes(2, 5), [], rest))
    parts = runtime.collect(first).prompt_parts + runtime.collect(second).prompt_parts
    assert [(part.row, len(part.scores), part.num_pooled) for part in parts] == [(1, 2, 1), (1, 1, 1), (1, 1, 2)]
    scores = [score for part in parts for score in part.scores]
    assert [score.logprob for score in scores] == pytest.approx([s.logprob for s in whole.scores], abs=1e-4)
    summed = [sum(column) for column in zip(*(part.hidden_sum for part in parts), strict=True)]
    assert summed == pytest.approx(list(whole.hidden_sum), abs=1e-4)


def test_only_chunks_that_ask_tell_about_their_prompt(runtime: Runtime[Any]) -> None:
    plan = StepPlan(0, [start(0), start(1)], writes(0, 1) + writes(1, 2), [])
    plan.prefill = [prefill(0, [30, 31]), asking(1, [30, 31], 0, None)]
    output = run(runtime, plan)
    assert [part.row for part in output.prompt_parts] == [1]
    assert [row.row for row in output.rows] == [0]


def test_scores_are_in_order_and_the_token_to_come_is_the_likeliest(runtime: Runtime[Any]) -> None:
    sampled = run(runtime, StepPlan(0, [start(0)], writes(0, 1), [], [prefill(0, [30, 31])])).rows[0].token
    assert isinstance(sampled, TextToken)
    plan = StepPlan(1, [start(1)], writes(1, 2), [], [asking(1, [30, 31], 0, sampled.id)])
    score = run(runtime, plan).prompt_parts[0].scores[-1]
    assert (score.rank, score.top[0]) == (1, (sampled.id, score.logprob))
    assert len(score.top) == 2
    assert score.top[0][1] >= score.top[1][1]
    other = run(runtime, StepPlan(2, prefill=[asking(1, [30, 31], 0, (sampled.id + 1) % 320)])).prompt_parts[0]
    assert other.scores[-1].top == score.top
    assert other.scores[-1].rank > 1
    assert other.scores[-1].logprob < score.logprob


def test_a_coordinate_is_scored_by_its_id_and_a_picture_is_not(runtime: Runtime[Any]) -> None:
    def scored(step: int, following: ContextItem) -> list[float]:
        chunk = PrefillChunk(0, 0, [TextToken(30)], 1, False, prompt_outputs=ASKED, following=following)
        part = run(runtime, StepPlan(step, [start(0)], writes(0, 1), [], [chunk])).prompt_parts[0]
        return [score.logprob for score in part.scores]

    assert scored(0, CoordToken(0.25)) == scored(1, TextToken(5))
    assert scored(2, ImageSpan("abcd" * 8, 4)) == []


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


def test_a_row_goes_through_the_adapter_in_its_slot_and_its_neighbour_through_none(runtime: Runtime[Any]) -> None:
    prompt = [30, 31, 32, 33]

    def tokens(step: int, slots: list[int | None], loads: list[AdapterLoad]) -> list[Token | None]:
        starts = [replace(start(row), adapter_slot=slot) for row, slot in enumerate(slots)]
        pages = [write for row in range(len(slots)) for write in writes(row, row, 10 + row)]
        chunks = [prefill(row, prompt) for row in range(len(slots))]
        output = run(runtime, StepPlan(step, starts, pages, prefill=chunks, adapter_loads=loads))
        return [row.token for row in sorted(output.rows, key=lambda row: row.row)]

    adapter = golden_adapter("md2")
    scaled = replace(adapter, alpha=-3.0 * adapter.rank)
    base = tokens(0, [None], [])[0]
    first = AdapterLoad(1, "first", adapter)
    beside = tokens(1, [1, None, 1], [first])
    assert beside[1] == base
    assert beside[0] == beside[2] != base
    assert tokens(2, [1], []) == [beside[0]], "a slot keeps its adapter"
    other = tokens(3, [0, 1, None], [AdapterLoad(0, "other", scaled)])
    assert other[1:] == [beside[0], base]
    assert tokens(4, [1], [AdapterLoad(1, "other", scaled)]) == other[:1], "a load takes the slot over"
    assert other[0] != beside[0]
