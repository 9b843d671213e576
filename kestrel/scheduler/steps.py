"""What the next step does, the steps in flight (launched, results not seen yet), and what a collected one means.

A step is one token for every running sequence, then prefill within the token budget. While an answer is streamed, the
budget is smaller and pictures are encoded in slices before they are prefilled, so that a step takes about as long as
the one before it. Its tokens are then told when all of it is over, so that the gaps between them are as even. Where a
picture takes seconds, it always comes in slices, and streams get more time for themselves than pictures take beside
them.

Invariants of the steps in flight:
P1  Steps are collected in the order they were launched, each exactly once.
P2  While a step is planned, at most `depth` launched steps are uncollected.
P3  A sequence's row and pages are kept until no uncollected step names it.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic

from kestrel.errors import OutOfPages, RequestCancelled
from kestrel.request import FinishReason, GeneratedToken, PromptReport, SkillOutput, StreamDelta, StreamUpdate
from kestrel.runtime.contract import (
    POSITIONS_PER_CROP,
    DecodeRow,
    PageCopy,
    PageWrite,
    PictureSlice,
    PrefillChunk,
    RowOutput,
    RowStart,
    RuntimeLimits,
    StepOutput,
    StepPlan,
    StepT,
)
from kestrel.scheduler.sequence import Sequence, Stage
from kestrel.tokens import ContextItem, ImageSpan, has_pictures


@dataclass(slots=True)
class PlannedWork:
    """What one step does for one sequence."""

    sequence: Sequence
    end_position: int
    samples: bool
    publishes: bool
    """The prompt, or an image span of it, is complete after this step and can be shared."""


@dataclass(slots=True)
class PlannedStep:
    plan: StepPlan
    work: dict[int, PlannedWork]
    slice_budget: int = 0
    """Positions that are left for slices of pictures."""
    sliced: list[Sequence] = field(default_factory=list)
    """Those whose picture is encoded some more; they have no other work in the step."""


REST_PER_WORK = 2.0
"""Pictures take a third of the time at most while an answer is streamed: the rows of others slow a stream already."""
NO_PICTURES: Mapping[str, Any] = MappingProxyType({})


class StepPlanner:
    def __init__(self, limits: RuntimeLimits, has_encoded: Callable[[str], bool], clock: Callable[[], float]) -> None:
        assert not (limits.paces_pictures and limits.steps_in_flight), "steps side by side have no time of their own"
        self._limits = limits
        self._has_encoded = has_encoded
        self._clock = clock
        self._pictures_at_s: float | None = None
        self._next_slice_at_s = 0.0
        self._next_step_id = 0
        self._started: list[Sequence] = []

    def announce(self, sequence: Sequence) -> None:
        """A sequence took its row: the next step initialises it."""
        self._started.append(sequence)

    def withdraw(self, sequence: Sequence) -> None:
        """A sequence lost its row before any step named it."""
        if sequence in self._started:
            self._started.remove(sequence)

    def plan(self, running: list[Sequence]) -> PlannedStep:
        """`running` have pages for their next token already (see `reserve_next_token`)."""
        step = PlannedStep(StepPlan(self._next_step_id), {})
        self._next_step_id += 1
        self._plan_starts(step.plan)
        for sequence in running:
            if sequence.can_decode:
                self._plan_decode(step, sequence)
        limits = self._limits
        slice_tokens = limits.streaming_prefill_tokens
        is_streaming = slice_tokens > 0 and any(s.is_streaming for s in running)
        in_slices = is_streaming or (slice_tokens > 0 and limits.paces_pictures)
        step.slice_budget = self._slice_budget(running, is_streaming and bool(step.plan.decode))
        budget = limits.max_prefill_tokens
        if is_streaming:
            budget = min(budget, slice_tokens)
        for sequence in running:
            if sequence.stage is Stage.PREFILL and budget > 0:
                budget = self._plan_prefill(step, sequence, budget, in_slices)
        step.plan.is_told_whole = is_streaming and not step.plan.only_decodes
        is_timed = limits.paces_pictures and _works_on_pictures(step.plan)
        self._pictures_at_s = self._clock() if is_timed else None
        return step

    def _starts_stream(self, sequence: Sequence) -> bool:
        """Whether the next step may bring a stream nearer to its first token, without encoding a picture for it."""
        if not sequence.request.is_streaming or sequence.stage is not Stage.PREFILL:
            return False
        return self._picture_to_encode(sequence.items[sequence.next_item]) is None

    def _slice_budget(self, running: list[Sequence], streams_beside: bool) -> int:
        """0 for `REST_PER_WORK` times as long as the last work for pictures took, while an answer is streamed or
        about to be."""
        if not self._limits.paces_pictures:
            return self._limits.max_prefill_tokens
        if not streams_beside and not any(map(self._starts_stream, running)):
            return self._limits.streaming_prefill_tokens
        return 0 if self._clock() < self._next_slice_at_s else POSITIONS_PER_CROP

    def step_ended(self) -> None:
        """Notes how long pictures took; to be called once a step, before the next is planned."""
        if self._pictures_at_s is not None:
            now_s, began_s = self._clock(), self._pictures_at_s
            # A prefill does not wait for the rest of its last slice.
            unspent_s = max(0.0, self._next_slice_at_s - began_s)
            self._next_slice_at_s = now_s + REST_PER_WORK * (now_s - began_s) + unspent_s

    def _plan_starts(self, plan: StepPlan) -> None:
        for sequence in self._started:
            assert sequence.lease is not None
            prompt_ids, generated_ids = sequence.penalised_ids()
            plan.starts.append(
                RowStart(
                    row=sequence.row,
                    grammar=sequence.request.grammar,
                    sampling=sequence.request.sampling,
                    max_total_tokens=sequence.max_total_tokens,
                    grammar_state=sequence.grammar_state,
                    phase_spent=sequence.phase_spent,
                    num_generated=sequence.num_generated,
                    prompt_ids=prompt_ids,
                    generated_ids=generated_ids,
                    adapter_slot=None if sequence.slot_lease is None else sequence.slot_lease.slot,
                )
            )
            plan.page_writes.append(PageWrite(sequence.row, 0, tuple(sequence.lease.pages)))
            plan.page_copies += [PageCopy(source, target) for source, target in sequence.lease.take_copies()]
            sequence.num_written_pages = len(sequence.lease.pages)
        self._started.clear()

    def _plan_decode(self, step: PlannedStep, sequence: Sequence) -> None:
        assert sequence.lease is not None
        position = sequence.num_launched
        pages, first = sequence.lease.pages, sequence.num_written_pages
        if first < len(pages):
            step.plan.page_writes.append(PageWrite(sequence.row, first, tuple(pages[first:])))
        sequence.num_written_pages = len(pages)
        step.plan.decode.append(DecodeRow(sequence.row, position))
        _add_mask(step.plan, sequence)
        sequence.num_launched = position + 1
        step.work[sequence.row] = PlannedWork(sequence, position + 1, samples=True, publishes=False)

    def _plan_prefill(self, step: PlannedStep, sequence: Sequence, budget: int, in_slices: bool) -> int:
        """Add the sequence's next chunks; returns the budget left. A span alone may exceed the budget. How many crops a
        picture has left is not known here: a slice costs what it may take."""
        publishes = False
        while budget > 0 and sequence.next_item < len(sequence.items):
            chunk = self._next_chunk(sequence, budget)
            picture = self._picture_to_encode(chunk.items[0]) if in_slices else None
            if picture is not None:
                if step.slice_budget <= 0:
                    break
                max_crops = max(1, min(budget, step.slice_budget) // POSITIONS_PER_CROP)
                step.plan.picture_slices.append(PictureSlice(picture, chunk.images.get(picture), max_crops))
                step.sliced.append(sequence)
                step.slice_budget -= max_crops * POSITIONS_PER_CROP
                return budget - max_crops * POSITIONS_PER_CROP
            if chunk.num_positions > budget and (step.plan.prefill or step.plan.picture_slices):
                break
            step.plan.prefill.append(chunk)
            sequence.next_item += len(chunk.items)
            sequence.num_launched += chunk.num_positions
            publishes |= chunk.samples or isinstance(chunk.items[0], ImageSpan)
            budget -= chunk.num_positions
            samples = chunk.samples
            if samples:
                _add_mask(step.plan, sequence)
            step.work[sequence.row] = PlannedWork(sequence, sequence.num_launched, samples, publishes)
        if sequence.next_item == len(sequence.items):
            sequence.stage = Stage.DECODE
        return budget

    def _picture_to_encode(self, first: ContextItem) -> str | None:
        if not isinstance(first, ImageSpan) or self._has_encoded(first.digest):
            return None
        return first.digest

    def _next_chunk(self, sequence: Sequence, budget: int) -> PrefillChunk:
        items, first = sequence.items, sequence.next_item
        is_picture = isinstance(items[first], ImageSpan)
        if is_picture:
            last = first + 1
            positions = items[first].num_positions  # pyright: ignore[reportAttributeAccessIssue]
        else:
            last = min(first + budget, len(items))
            if has_pictures(items[first:last]):
                last = next(index for index in range(first, last) if isinstance(items[index], ImageSpan))
            positions = last - first
        return PrefillChunk(
            row=sequence.row,
            start=sequence.num_launched,
            items=items[first:last],
            num_positions=positions,
            samples=last == len(items) and sequence.max_total_tokens > 0,
            images=sequence.request.images if is_picture else NO_PICTURES,
            prompt_outputs=sequence.missing_prompt_outputs,
            following=items[last] if last < len(items) else None,
        )


def _works_on_pictures(plan: StepPlan) -> bool:
    return bool(plan.picture_slices) or any(isinstance(chunk.items[0], ImageSpan) for chunk in plan.prefill)


def _add_mask(plan: StepPlan, sequence: Sequence) -> None:
    if sequence.constraint is not None:
        plan.masks[sequence.row] = sequence.constraint.allowed


def reserve_next_token(sequence: Sequence) -> bool:
    """Make sure the sequence has a page for its next position; False when the pool is exhausted."""
    assert sequence.lease is not None
    try:
        sequence.lease.extend_to(sequence.num_launched + 1)
    except OutOfPages:
        return False
    return True


# ---------------------------------------------------------------------- steps in flight


@dataclass(slots=True)
class LaunchedStep(Generic[StepT]):
    step: StepT
    work: dict[int, PlannedWork]  # by row


class Pipeline(Generic[StepT]):
    def __init__(self, depth: int, launch_waits: bool) -> None:
        self._depth = depth
        self._launch_waits = launch_waits
        self._launched: deque[LaunchedStep[StepT]] = deque()

    def __len__(self) -> int:
        return len(self._launched)

    @property
    def is_synchronous(self) -> bool:
        """Results are ready when launch returns; commit before planning the next step."""
        return self._depth == 0 and self._launch_waits

    @property
    def is_over_depth(self) -> bool:
        return len(self._launched) > self._depth

    def push(self, launched: LaunchedStep[StepT]) -> None:
        for work in launched.work.values():
            work.sequence.num_in_flight += 1
            work.sequence.num_sampling += work.samples
        self._launched.append(launched)

    def pop(self) -> LaunchedStep[StepT]:
        launched = self._launched.popleft()
        for work in launched.work.values():
            work.sequence.num_in_flight -= 1
            work.sequence.num_sampling -= work.samples
        return launched


# ---------------------------------------------------------------------- commit
# Tokens to the skill, finished sequences out, prefixes shared.


class Committer:
    """Turns step outputs into stream updates. Errors of a skill fail its own request only."""

    def __init__(self, clock: Callable[[], float], on_picture_shared: Callable[[Sequence], None]) -> None:
        self._clock = clock
        self._on_picture_shared = on_picture_shared

    def commit(self, output: StepOutput, work: dict[int, PlannedWork]) -> list[StreamUpdate]:
        updates: list[StreamUpdate] = []
        now = self._clock()
        for row, error in output.failures.items():
            if not work[row].sequence.is_done:
                work[row].sequence.is_tainted = True
                updates.append(self.fail(work[row].sequence, error))
        for part in output.prompt_parts:
            report = work[part.row].sequence.open_report
            if report is not None:
                report.add(part.scores, part.hidden_sum, part.num_pooled)
        for planned in work.values():
            sequence = planned.sequence
            if sequence.is_done:
                continue
            sequence.num_committed = planned.end_position
            if planned.publishes:
                sequence.share()
                self._on_picture_shared(sequence)
            if sequence.open_report is not None:
                self._report_prompt(sequence, sequence.open_report, updates)
        for row_output in output.rows:
            sequence = work[row_output.row].sequence
            if not sequence.is_done:
                self._take_token(sequence, row_output, now, updates)
        return updates

    def fail(self, sequence: Sequence, error: BaseException) -> StreamUpdate:
        """End a sequence without a result."""
        sequence.stage = Stage.DONE
        cancelled = isinstance(error, RequestCancelled)
        return StreamUpdate(
            sequence.request_id,
            token_index=sequence.num_generated,
            finish_reason=FinishReason.CANCELLED if cancelled else FinishReason.ERROR,
            metrics=sequence.finish_metrics(self._clock()),
            error=error,
        )

    def _report_prompt(self, sequence: Sequence, report: PromptReport, updates: list[StreamUpdate]) -> None:
        """Hand over the prompt's outputs once they are complete; a request for nothing else ends here."""
        if sequence.num_committed < sequence.request.num_prompt_positions:
            return
        sequence.open_report = None
        try:
            sequence.request.consumer.consume_prompt(report)
            if sequence.max_total_tokens == 0:
                self._finish(sequence, FinishReason.LENGTH, updates)
        except (Exception, CancelledError) as error:  # a skill's own fault must not reach its neighbours
            updates.append(self.fail(sequence, error))

    def _take_token(self, sequence: Sequence, output: RowOutput, now: float, updates: list[StreamUpdate]) -> None:
        if sequence.first_token_s is None:
            sequence.first_token_s = now
        try:
            delta, finish = None, output.finish
            if output.token is not None:
                sequence.note_token_time(now)
                if output.finish is None:
                    sequence.constrain(output.token)
                sequence.append(output.token, output.grammar_state, output.phase_spent)
                if sequence.request.tells_tokens:
                    told = GeneratedToken(output.token, output.grammar_state, output.phase_spent, output.logprobs)
                    sequence.untold.append(told)
                delta = sequence.request.consumer.consume(output.token, output.logprobs)
            elif output.end_id is not None and output.logprobs is not None:
                sequence.request.consumer.consume_end(output.end_id, output.logprobs)
            if delta is not None:
                updates += _delta_updates(sequence, delta)
                finish = FinishReason.STOP if delta.ends else finish
            if finish is not None:
                self._finish(sequence, finish, updates)
        except (Exception, CancelledError) as error:  # a skill's own fault must not reach its neighbours
            updates.append(self.fail(sequence, error))

    def _finish(self, sequence: Sequence, reason: FinishReason, updates: list[StreamUpdate]) -> None:
        consumer = sequence.request.consumer
        held_back = consumer.flush()
        if held_back is not None:
            updates += _delta_updates(sequence, held_back)
            reason = FinishReason.STOP if held_back.ends else reason
        result = consumer.finish(reason)
        if not isinstance(result, SkillOutput):
            raise TypeError(f"finish of the skill returned a {type(result).__name__}, not a SkillOutput")
        sequence.stage = Stage.DONE
        updates.append(
            StreamUpdate(
                sequence.request_id,
                token_index=sequence.num_generated,
                finish_reason=reason,
                output=result,
                metrics=sequence.finish_metrics(self._clock()),
            )
        )


def _delta_updates(sequence: Sequence, delta: StreamDelta) -> list[StreamUpdate]:
    """The delta for the stream; nothing when nobody reads it, or all it says is that the skill has enough."""
    if not isinstance(delta, StreamDelta):
        raise TypeError(f"the skill returned a {type(delta).__name__} for a stream, not a StreamDelta")
    if not sequence.request.has_reader or delta == StreamDelta(ends=True):
        return []
    tokens, sequence.untold = tuple(sequence.untold), []
    return [StreamUpdate(sequence.request_id, delta=delta, token_index=sequence.num_generated, tokens=tokens)]
