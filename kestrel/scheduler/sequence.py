"""One request on its way: what is known, what is launched, what is committed.

Three position counts, always in this order: `committed ≤ launched ≤ known + in flight`.
- known: positions of the prompt and of every token the host has seen.
- launched: positions whose keys and values were written by a step that was launched.
- committed: positions of steps whose results the host has seen.
"""

from __future__ import annotations

from enum import Enum

from kestrel.cache import PageLease
from kestrel.request import GenerationRequest, PromptOutputs, PromptReport, RequestMetrics, TokenConstraint
from kestrel.scheduler.admission import SlotLease
from kestrel.tokens import ContextItem, ImageSpan, TextToken, Token, item_positions


class Stage(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


class Sequence:
    def __init__(self, request: GenerationRequest, queue_key: float, max_total_tokens: int) -> None:
        self.request = request
        self.queue_key = queue_key
        self.max_total_tokens = max_total_tokens
        self.items: list[ContextItem] = list(request.items)
        self.num_known = request.num_prompt_positions
        self.stage = Stage.WAITING
        self.metrics = RequestMetrics(input_tokens=request.num_prompt_positions)
        self.first_step_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.put_aside_s = 0.0
        """When it was its turn and its adapter found no slot."""

        self.num_generated = 0
        self.grammar_state = 0
        self.phase_spent = 0

        self.row = -1
        self.lease: PageLease | None = None
        self.slot_lease: SlotLease | None = None
        self.next_item = 0
        self.num_launched = 0
        self.num_committed = 0
        self.num_in_flight = 0
        self.num_sampling = 0
        self.num_written_pages = 0
        self.is_tainted = False
        """Its own computation failed: nothing of it may be shared."""
        self.leading_picture = _leading_picture(request.items)
        self.open_report = None if request.prompt_outputs is None else PromptReport()
        """What is known of the prompt's outputs so far; None when none are asked for or the skill has them."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def is_done(self) -> bool:
        return self.stage is Stage.DONE

    @property
    def can_decode(self) -> bool:
        """Whether another token may be planned, counting those still in flight as emitted.

        With a constraint none may be in flight: what may come next depends on it.
        """
        if self.request.constraint is not None and self.num_sampling > 0:
            return False
        return self.stage is Stage.DECODE and self.num_generated + self.num_sampling < self.max_total_tokens

    @property
    def is_streaming(self) -> bool:
        return self.request.is_streaming and self.stage is Stage.DECODE

    @property
    def reads_prefix_cache(self) -> bool:
        """Outputs of the prompt need every position of it computed; once they are known, a restart needs them not."""
        return self.open_report is None

    @property
    def missing_prompt_outputs(self) -> PromptOutputs | None:
        return None if self.open_report is None else self.request.prompt_outputs

    @property
    def constraint(self) -> TokenConstraint | None:
        """What the next token has to match, when a constraint holds in the current phase."""
        constraint = self.request.constraint
        if constraint is None or self.request.grammar.states[self.grammar_state].phase != constraint.phase:
            return None
        return constraint.tokens

    def start(self, row: int, lease: PageLease, slot_lease: SlotLease | None = None) -> None:
        """Take a row, pages and an adapter's slot; skip what the lease found in the prefix cache."""
        self.row, self.lease, self.slot_lease = row, lease, slot_lease
        self.stage = Stage.PREFILL
        self.num_launched = self.num_committed = lease.num_cached
        self.next_item = self._item_at(lease.num_cached)
        if self.open_report is not None:
            self.open_report = PromptReport()
        if self.metrics.num_preemptions == 0:
            self.metrics.cached_tokens = lease.num_cached

    def restart_later(self) -> None:
        """Give everything up but what the host knows; the context is computed again after the next start."""
        assert self.num_in_flight == 0
        self.row, self.lease = -1, None
        self.stage = Stage.WAITING
        self.metrics.num_preemptions += 1

    def constrain(self, token: Token) -> None:
        """Tell the constraint of the token to be appended, if one held for it."""
        constraint = self.constraint
        if constraint is not None:
            assert isinstance(token, TextToken), "a constraint holds for text only"
            constraint.accept(token.id)

    def append(self, token: Token, grammar_state: int, phase_spent: int) -> None:
        self.items.append(token)
        self.num_known += 1
        self.num_generated += 1
        self.grammar_state = grammar_state
        self.phase_spent = phase_spent

    def penalised_ids(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Text ids of (the prompt, the answer so far) that penalties look at; none for a request without penalties.

        What ends the answer is left out of the prompt: several models begin their texts with the same id.
        """
        request = self.request
        if not request.sampling.has_penalties:
            return (), ()
        ends = request.grammar.end_ids
        prompt = tuple(item.id for item in request.items if isinstance(item, TextToken) and item.id not in ends)
        answer = self.items[len(request.items) :]
        return prompt, tuple(item.id for item in answer if isinstance(item, TextToken))

    def note_token_time(self, now: float) -> None:
        if self.last_token_s is not None:
            self.metrics.token_intervals_s.append(now - self.last_token_s)
        self.last_token_s = now

    def committed_items(self) -> list[ContextItem]:
        """The items whose keys and values are complete."""
        return self.items[: self._item_at(self.num_committed)]

    @property
    def misses_leading_picture(self) -> bool:
        """Whether the first picture of the context still has to be computed."""
        return self.leading_picture is not None and self.next_item < len(self.leading_picture)

    def share(self) -> None:
        """Publish what is complete; a lease whose page copies never ran has nothing to give."""
        assert self.lease is not None
        if not self.lease.copies and not self.is_tainted:
            self.lease.publish(self.committed_items())

    def finish_metrics(self, now: float) -> RequestMetrics:
        metrics = self.metrics
        metrics.output_tokens = self.num_generated
        first_step = now if self.first_step_s is None else self.first_step_s
        first_token = now if self.first_token_s is None else self.first_token_s
        metrics.queue_time_ms = (first_step - self.request.submitted_s) * 1000.0
        metrics.ttft_ms = (first_token - self.request.submitted_s) * 1000.0
        metrics.prefill_time_ms = (first_token - first_step) * 1000.0
        metrics.decode_time_ms = (now - first_token) * 1000.0
        return metrics

    def _item_at(self, position: int) -> int:
        """Index of the item that begins at `position`."""
        if position >= self.request.num_prompt_positions:
            return len(self.request.items) + position - self.request.num_prompt_positions
        at = 0
        for index, item in enumerate(self.items):
            if at == position:
                return index
            at += item_positions(item)
        raise AssertionError(f"position {position} lies inside an item")


def _leading_picture(items: tuple[ContextItem, ...]) -> tuple[ContextItem, ...] | None:
    """The context up to and with its first picture."""
    for index, item in enumerate(items):
        if isinstance(item, ImageSpan):
            return items[: index + 1]
    return None
