"""What a collected step means for its sequences: tokens to the skill, finished ones out, prefixes shared."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable

from kestrel.errors import RequestCancelled
from kestrel.request import FinishReason, SkillOutput, StreamDelta, StreamUpdate
from kestrel.runtime.contract import RowOutput, StepOutput
from kestrel.scheduler.sequence import Sequence, Stage
from kestrel.scheduler.steps import PlannedWork


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
            if not planned.sequence.is_done:
                self._advance(planned)
                self._report_prompt(planned.sequence, updates)
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

    def _advance(self, planned: PlannedWork) -> None:
        sequence = planned.sequence
        sequence.num_committed = planned.end_position
        if planned.publishes:
            sequence.share()
            self._on_picture_shared(sequence)

    def _report_prompt(self, sequence: Sequence, updates: list[StreamUpdate]) -> None:
        """Hand over the prompt's outputs once they are complete; a request for nothing else ends here."""
        report = sequence.open_report
        if report is None or sequence.num_committed < sequence.request.num_prompt_positions:
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
    """The delta for the stream; nothing when all it says is that the skill has enough."""
    if not isinstance(delta, StreamDelta):
        raise TypeError(f"the skill returned a {type(delta).__name__} for a stream, not a StreamDelta")
    if delta == StreamDelta(ends=True):
        return []
    return [StreamUpdate(sequence.request_id, delta=delta, token_index=sequence.num_generated)]
