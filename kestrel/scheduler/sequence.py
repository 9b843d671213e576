"""One request on its way: what is known, what is launched, what is committed.

Three position counts, always in this order: `committed ≤ launched ≤ known + in flight`.
- known: positions of the prompt and of every token the host has seen.
- launched: positions whose keys and values were written by a step that was launched.
- committed: positions of steps whose results the host has seen.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from enum import Enum

from kestrel.cache import PageLease
from kestrel.errors import RequestError
from kestrel.request import (
    AdapterUse,
    GeneratedToken,
    GenerationRequest,
    PromptOutputs,
    PromptReport,
    RequestMetrics,
    TokenConstraint,
)
from kestrel.runtime.contract import AdapterLoad
from kestrel.tokens import ContextItem, ImageSpan, Text, TextToken, Token, has_pictures


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
        self.items: Text | list[ContextItem] = (
            Text(request.items.ids) if isinstance(request.items, Text) else list(request.items)
        )
        self.num_known = request.num_prompt_positions
        self.stage = Stage.WAITING
        self.metrics = RequestMetrics(input_tokens=request.num_prompt_positions)
        self.first_step_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.put_aside_s = 0.0
        """When it was its turn and its adapter found no slot."""

        self.untold: list[GeneratedToken] = []
        """Tokens for the next part of the stream."""
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
        self._pictures = _pictures(request.items)
        self.leading_picture = tuple(request.items[: self._pictures[0][0] + 1]) if self._pictures else None
        """The context up to and with its first picture."""
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
            self.metrics.cached_tokens = min(lease.num_cached, self.request.num_prompt_positions)

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

    def resume(self) -> None:
        """Take in what another engine has generated, as if this had been preempted behind it."""
        if len(self.request.resumed) >= max(1, self.max_total_tokens):
            raise RequestError(
                "resumed", f"holds {len(self.request.resumed)} tokens of {self.max_total_tokens} already"
            )
        for known in self.request.resumed:
            self.constrain(known.token)
            self.append(known.token, known.grammar_state, known.phase_spent)
            self.request.consumer.consume(known.token, known.logprobs)

    def append(self, token: Token, grammar_state: int, phase_spent: int) -> None:
        if isinstance(self.items, Text) and not isinstance(token, TextToken):
            self.items = list(self.items)
        self.items.append(token)  # pyright: ignore[reportArgumentType]
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

    def committed_items(self) -> Text | list[ContextItem]:
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
        index = position
        for at, picture in self._pictures:
            if index <= at:
                break
            index -= picture.num_positions - 1
            assert index > at, f"position {position} lies inside an item"
        return index


def _pictures(items: Items[ContextItem]) -> list[tuple[int, ImageSpan]]:
    """Those of a prompt, and where they stand; answers have none."""
    if not has_pictures(items):
        return []
    return [(index, item) for index, item in enumerate(items) if isinstance(item, ImageSpan)]


# ---------------------------------------------------------------------- adapter slots
# A slot stays with its adapter after the last user left, and goes to another adapter only when none is free: the one
# left longest ago makes room.


class SlotLease:
    """The right of one sequence to a slot."""

    def __init__(self, pool: SlotPool, slot: int) -> None:
        self._pool = pool
        self.slot = slot

    def release(self) -> None:
        self._pool.give_back(self)


class SlotPool:
    def __init__(self, num_slots: int) -> None:
        self._unused = list(range(num_slots - 1, -1, -1))
        self._num_slots = num_slots
        self._slot_of: dict[str, int] = {}
        self._adapter_in: dict[int, AdapterUse] = {}
        self._leases: dict[int, set[SlotLease]] = {slot: set() for slot in range(num_slots)}
        self._idle: dict[int, None] = {}  # with an adapter and without users, the one left longest ago first
        self._loads: dict[int, AdapterLoad] = {}
        self.num_loads = 0
        """Since the start."""

    @property
    def num_slots(self) -> int:
        return self._num_slots

    @property
    def num_free(self) -> int:
        """Slots that another adapter could have."""
        return len(self._unused) + len(self._idle)

    @property
    def num_leases(self) -> int:
        return sum(map(len, self._leases.values()))

    def running(self) -> list[str]:
        """Names of the adapters in use. Other threads may ask this too."""
        adapters = self._adapter_in.copy()
        return sorted({use.name for slot, use in adapters.items() if self._leases[slot]})

    def holds(self, use: AdapterUse) -> bool:
        return use.key in self._slot_of

    def could_hold(self, use: AdapterUse) -> bool:
        """Whether the adapter has a slot or could have one now."""
        return self.num_free > 0 or self.holds(use)

    def try_acquire(self, use: AdapterUse) -> SlotLease | None:
        """A lease on the adapter's slot, None when every slot is in use for another."""
        slot = self._slot_of.get(use.key)
        if slot is None:
            slot = self._free_slot()
            if slot is None:
                return None
            self._put(use, slot)
        self._idle.pop(slot, None)
        lease = SlotLease(self, slot)
        self._leases[slot].add(lease)
        return lease

    def give_back(self, lease: SlotLease) -> None:
        users = self._leases[lease.slot]
        assert lease in users, "a slot was released twice"
        users.remove(lease)
        if not users:
            self._idle[lease.slot] = None

    def take_loads(self) -> list[AdapterLoad]:
        """What the next launch has to copy into slots."""
        loads, self._loads = list(self._loads.values()), {}
        return loads

    def check_integrity(self) -> None:
        assert len(self._unused) + len(self._adapter_in) == self._num_slots, "a slot is lost"
        assert {use.key: slot for slot, use in self._adapter_in.items()} == self._slot_of, "slots disagree"
        assert set(self._idle) == {slot for slot in self._adapter_in if not self._leases[slot]}, "idle slots miscounted"
        assert not any(self._leases[slot] for slot in self._unused), "an empty slot is in use"

    def _free_slot(self) -> int | None:
        if self._unused:
            return self._unused.pop()
        slot = next(iter(self._idle), None)
        if slot is not None:
            del self._idle[slot]
            del self._slot_of[self._adapter_in.pop(slot).key]
        return slot

    def _put(self, use: AdapterUse, slot: int) -> None:
        self._slot_of[use.key], self._adapter_in[slot] = slot, use
        self._loads[slot] = AdapterLoad(slot, use.key, use.weights)
        self.num_loads += 1
