"""What a collected step means for its sequences: tokens to the skill, finished ones out, prefixes shared."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable

from kestrel.errors import RequestCancelled
from kestrel.request import FinishReason, SkillOutput, StreamDelta, StreamUpdate
from kestrel.runtime.contract import RowOutput, StepOutput
from kestrel.scheduler.pipeline import PlannedWork
from kestrel.scheduler.sequence import Sequence, Stage


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
        for planned in work.values():
            if not planned.sequence.is_done:
                self._advance(planned)
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

    def _take_token(self, sequence: Sequence, output: RowOutput, now: float, updates: list[StreamUpdate]) -> None:
        if sequence.first_token_s is None:
            sequence.first_token_s = now
        try:
            delta = None
            if output.token is not None:
                if output.finish is None:
                    sequence.constrain(output.token)
                sequence.append(output.token, output.grammar_state, output.phase_spent)
                delta = sequence.request.consumer.consume(output.token, output.logprobs)
            if delta is not None:
                updates.append(_delta_update(sequence, delta))
            if output.finish is not None:
                self._finish(sequence, output.finish, updates)
        except (Exception, CancelledError) as error:  # a skill's own fault must not reach its neighbours
            updates.append(self.fail(sequence, error))

    def _finish(self, sequence: Sequence, reason: FinishReason, updates: list[StreamUpdate]) -> None:
        consumer = sequence.request.consumer
        held_back = consumer.flush()
        if held_back is not None:
            updates.append(_delta_update(sequence, held_back))
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


def _delta_update(sequence: Sequence, delta: StreamDelta) -> StreamUpdate:
    if not isinstance(delta, StreamDelta):
        raise TypeError(f"the skill returned a {type(delta).__name__} for a stream, not a StreamDelta")
    return StreamUpdate(sequence.request_id, delta=delta, token_index=sequence.num_generated)
