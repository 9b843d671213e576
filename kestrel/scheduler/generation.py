"""The step loop: commit what is due, admit, plan, launch; results that are ready when launch returns are committed too.

A request's life: `add` checks it can ever fit and queues it; `admit` gives it a row and pages (a cached prefix makes
that cheap); each `step` prefills a chunk of it or decodes one token; `commit` feeds tokens to its skill until the
grammar or a budget ends it; then its context is published for follow-ups and everything it held is released.

Not thread-safe: one thread owns the scheduler and its runtime.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from kestrel.cache import CacheManager
from kestrel.errors import ContextTooLong, RequestCancelled, RequestError
from kestrel.request import GenerationRequest, StreamUpdate, require_free_id
from kestrel.runtime.contract import Runtime, RuntimeLimits, StepT
from kestrel.scheduler.admission import Admission
from kestrel.scheduler.pictures_to_come import PicturesToCome
from kestrel.scheduler.queues import WaitingQueue
from kestrel.scheduler.sequence import Sequence, SlotPool, Stage
from kestrel.scheduler.steps import Committer, LaunchedStep, Pipeline, PlannedStep, StepPlanner, reserve_next_token

LONG_PREFILL = 2048
"""Positions of a step that keeps a GPU at work for longer than it takes to read a few requests."""


@dataclass(frozen=True, slots=True)
class AdapterTraffic:
    """Adapters at one moment."""

    num_slots: int
    running: list[str]
    waiting: list[str]
    loads_total: int


class GenerationScheduler(Generic[StepT]):
    def __init__(
        self,
        runtime: Runtime[StepT],
        cache: CacheManager,
        *,
        priority_ageing_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        limits = runtime.limits
        self._runtime = runtime
        self._limits = limits
        self._cache = cache
        self._clock = clock
        self._queue = WaitingQueue(priority_ageing_s)
        self._slots = SlotPool(limits.num_adapter_slots)
        self._admission = Admission(cache, self._queue, limits.max_batch_size, self._slots)
        self._planner = StepPlanner(limits, runtime.has_encoded, clock)
        most_ahead = limits.pictures_ahead
        assert not (most_ahead and limits.paces_pictures), "a picture ahead would take longer than it is meant to"
        self._ahead = PicturesToCome(self._admission, runtime.has_encoded, most_ahead) if most_ahead else None
        self._pipeline: Pipeline[StepT] = Pipeline(limits.steps_in_flight, limits.launch_waits)
        self._committer = Committer(clock, self._admission.picture_done)
        self._sequences: dict[str, Sequence] = {}
        self._running: list[Sequence] = []
        self._leaving: list[Sequence] = []
        self._notices: list[StreamUpdate] = []
        self._num_preemptions = 0

    # ------------------------------------------------------------------ what callers see

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._leaving or self._notices or len(self._pipeline))

    @property
    def has_steps_in_flight(self) -> bool:
        """Other threads may ask this too."""
        return len(self._pipeline) > 0

    is_in_long_prefill = False
    """Whether the newest step has `LONG_PREFILL` positions or more. Other threads may ask this too."""

    is_collecting = False
    """Whether it waits for the device now. Other threads may ask this too."""

    @property
    def num_waiting(self) -> int:
        return len(self._queue) + self._admission.num_parked

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_preemptions(self) -> int:
        """Since the start."""
        return self._num_preemptions

    @property
    def adapters(self) -> AdapterTraffic:
        """Other threads may ask this too."""
        return AdapterTraffic(
            self._slots.num_slots, self._slots.running(), self._admission.waiting_adapters(), self._slots.num_loads
        )

    def has_begun(self, request_id: str) -> bool:
        """Whether a request has been part of a step. Other threads may ask this too."""
        sequence = self._sequences.get(request_id)
        return sequence is not None and sequence.first_step_s is not None

    def add(self, request: GenerationRequest) -> None:
        """Queue a request. Raises RequestError when it can never run."""
        require_free_id(request.request_id, self._sequences)
        if request.adapter is not None and not self._limits.num_adapter_slots:
            raise RequestError("adapter", "this engine has no adapter slots; raise max_adapters")
        key = self._queue.key(request.priority, self._clock())
        sequence = Sequence(request, key, max_total_tokens(request, self._limits))
        if request.resumed:
            sequence.resume()
        self._sequences[request.request_id] = sequence
        self._queue.push(sequence)

    def cancel(self, request_id: str) -> bool:
        """End a request now; False when it is unknown or already over. Its pages come back within a step."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        self._end(sequence, RequestCancelled(f"request {request_id} was cancelled"))
        return True

    def fail_all(self, error: BaseException) -> list[StreamUpdate]:
        """End every request with `error`, without touching the runtime again."""
        for sequence in list(self._sequences.values()):
            self._end(sequence, error)
        notices, self._notices = self._notices, []
        return notices

    def settle(self) -> list[StreamUpdate]:
        """Commit what is due, waiting for a step that runs; whoever is added then is part of the next one."""
        updates: list[StreamUpdate] = []
        while self._pipeline.is_over_depth:
            updates += self._commit_oldest()
        self._release_leaving()
        return updates

    def step(self) -> list[StreamUpdate]:
        """One turn of the loop; returns what became known."""
        updates, self._notices = self._notices, []
        updates += self.settle()
        self._admit()
        planned = self._plan()
        if planned is not None:
            self._launch(planned)
        if len(self._pipeline) and (planned is None or self._pipeline.is_synchronous):
            updates += self._commit_oldest()
        self._release_leaving()
        return updates

    def check_integrity(self) -> None:
        """Recount rows, pages and queues; for tests and idle moments."""
        self._cache.check_integrity()
        self._slots.check_integrity()
        holders = [s for s in self._running + self._leaving if s.lease is not None]
        slot_holders = [s for s in holders if s.slot_lease is not None]
        assert self._slots.num_leases == len(slot_holders), "an adapter slot belongs to no sequence"
        self._admission.check_integrity(holders)
        assert self._cache.num_leases == len(holders), "a lease belongs to no sequence"
        assert len({s.row for s in holders}) == len(holders), "two sequences share a row"
        known = set(self._sequences.values())
        assert set(self._running) <= known, "a running sequence is not registered"
        for sequence in known - set(self._running):
            waits = (sequence in self._queue) + self._admission.is_parked(sequence)
            assert waits == 1, f"{sequence.request_id} waits in {waits} places"
        assert len(known) == len(self._running) + self.num_waiting, "a waiting sequence is not registered"

    # ------------------------------------------------------------------ the four parts of a step

    def _commit_oldest(self) -> list[StreamUpdate]:
        launched = self._pipeline.pop()
        self.is_collecting = True
        try:
            output = self._runtime.collect(launched.step)
        finally:
            self.is_collecting = False
        self._planner.step_ended()
        updates = self._committer.commit(output, launched.work)
        self._retire_done()
        return updates

    def _admit(self) -> None:
        for sequence in self._admission.admit_waiting(self._clock()):
            self._running.append(sequence)
            self._planner.announce(sequence)

    def _plan(self) -> PlannedStep | None:
        """The next step, or None when there is nothing to do or pages must first come back from a step in flight."""
        if not self._make_room():
            return None
        planned = self._planner.plan(self._running)
        if planned.plan.is_empty:
            return None
        planned.plan.adapter_loads = self._slots.take_loads()
        if self._ahead is not None and planned.plan.only_decodes and not any(s.is_streaming for s in self._running):
            self._ahead.add_to(planned.plan, self._clock())
        return planned

    def _launch(self, planned: PlannedStep) -> None:
        now = self._clock()
        for sequence in (*planned.sliced, *(work.sequence for work in planned.work.values())):
            if sequence.first_step_s is None:
                sequence.first_step_s = now
        self.is_in_long_prefill = sum(chunk.num_positions for chunk in planned.plan.prefill) >= LONG_PREFILL
        step = self._runtime.launch(planned.plan)
        self._pipeline.push(LaunchedStep(step, planned.work))

    # ------------------------------------------------------------------ pages for running sequences

    def _make_room(self) -> bool:
        """Give every decoding sequence a page for its next token, preempting the last in turn if need be."""
        for sequence in list(self._running):
            while sequence.can_decode and not reserve_next_token(sequence):
                if len(self._pipeline):
                    return False
                self._preempt()
        return True

    def _preempt(self) -> None:
        """Send the last in turn back to the queue; it keeps its tokens and computes their KV again.

        A sequence alone preempts itself: starting anew it may do without cached pages that are not its own.
        """
        victim = self._queue.last_in_turn(self._running)
        self._running.remove(victim)
        self._planner.withdraw(victim)
        victim.share()
        self._admission.release(victim)
        victim.restart_later()
        self._num_preemptions += 1
        self._queue.push(victim)
        if self._running:
            self._admission.hold_until_release()

    # ------------------------------------------------------------------ endings

    def _end(self, sequence: Sequence, error: BaseException) -> None:
        if sequence.stage is Stage.WAITING:
            self._admission.forget(sequence)
            del self._sequences[sequence.request_id]
        self._notices.append(self._committer.fail(sequence, error))
        self._retire_done()

    def _retire_done(self) -> None:
        done = [s for s in self._running if s.is_done]
        if not done:
            return
        self._running = [s for s in self._running if not s.is_done]
        for sequence in done:
            del self._sequences[sequence.request_id]
            self._planner.withdraw(sequence)
            self._leaving.append(sequence)

    def _release_leaving(self) -> None:
        """Share the finished contexts and free what no step in flight names any more."""
        still_named = [s for s in self._leaving if s.num_in_flight]
        for sequence in self._leaving:
            if sequence.num_in_flight == 0:
                sequence.share()
                self._admission.release(sequence)
        self._leaving = still_named


def max_total_tokens(request: GenerationRequest, limits: RuntimeLimits) -> int:
    """Tokens a request may emit over all phases. Raises when not even one fits, if any is wanted."""
    room = limits.max_positions - request.num_prompt_positions
    least = min(request.sampling.max_new_tokens, 1)
    if room < least:
        raise ContextTooLong(
            "prompt",
            f"has {request.num_prompt_positions} tokens but at most {limits.max_positions - least} fit. "
            f"This model's maximum context length is {limits.max_positions} tokens; "
            "shorten the prompt, or raise max_seq_length (and kv_cache_pages if set)",
        )
    has_one_phase = all(state.phase == 0 and state.when_spent is None for state in request.grammar.states)
    return min(room, request.sampling.max_new_tokens) if has_one_phase or least == 0 else room
