"""Grammars as device tables, and the machine that advances every row of a step at once.

All grammars seen so far share one table; a row's state is an index into it. Ids are stored as short padded lists per
state, so the tables stay small however large the vocabulary is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kestrel.grammar import END, Grammar, State
from kestrel.runtime.upload import upload

NO_ID = -1
MAX_KEPT_STATES = 8192
"""States kept before those of grammars that no row uses are dropped."""


@dataclass(frozen=True, slots=True)
class Advance:
    """What sampling did to each row."""

    sampled_B: Tensor
    """The id whose edge was taken."""
    emitted_B: Tensor
    state_B: Tensor
    """Next state; the current one where the row ended."""
    ended_B: Tensor
    changes_phase_B: Tensor
    carries_B: Tensor


class GrammarTables:
    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self._device = device
        self._base: dict[Grammar, int] = {}
        self._states: list[tuple[int, State]] = []  # (index of the grammar's first state, state)
        self._upload()

    def base_of(self, grammar: Grammar) -> int:
        """Index of the grammar's first state; uploads a grammar not seen before."""
        base = self._base.get(grammar)
        if base is None:
            base = len(self._states)
            self._base[grammar] = base
            self._states += [(base, state) for state in grammar.states]
            self._upload()
        return base

    @property
    def num_states(self) -> int:
        return len(self._states)

    def clear(self) -> None:
        self._base.clear()
        self._states.clear()

    def mask(self, logits_BV: Tensor, state_B: Tensor) -> Tensor:
        """Logits with everything a row's state forbids at −inf."""
        padded = torch.nn.functional.pad(logits_BV, (0, 1))
        limited = torch.full_like(padded, -torch.inf)
        allowed_BA = self._allowed[state_B]
        limited.scatter_(1, allowed_BA, padded.gather(1, allowed_BA))
        masked = torch.where(self._is_limited[state_B][:, None], limited, padded)
        masked.scatter_(1, self._suppressed[state_B], -torch.inf)
        return masked[:, :-1]

    def advance(self, state_B: Tensor, sampled_B: Tensor, is_spent_B: Tensor) -> Advance:
        when_spent_B = self._when_spent[state_B]
        sampled_B = torch.where(is_spent_B & (when_spent_B != NO_ID), when_spent_B, sampled_B)
        hits_BE = self._edge_id[state_B] == sampled_B[:, None]
        edge_B = torch.where(hits_BE.any(1), hits_BE.int().argmax(1), hits_BE.shape[1])
        goto_B = self._edge_goto[state_B, edge_B]
        emit_B = self._edge_emit[state_B, edge_B]
        ended_B = goto_B == END
        next_B = torch.where(ended_B, state_B, goto_B)
        return Advance(
            sampled_B=sampled_B,
            emitted_B=torch.where(emit_B == NO_ID, sampled_B, emit_B),
            state_B=next_B,
            ended_B=ended_B,
            changes_phase_B=self._phase[next_B] != self._phase[state_B],
            carries_B=self._carries[state_B],
        )

    def ends_when_spent(self, state_B: Tensor) -> Tensor:
        """Rows that a spent phase finishes (the others are moved on by `when_spent`)."""
        return self._when_spent[state_B] == NO_ID

    def end_ids(self, state_B: Tensor) -> Tensor:
        """[B, E]: the ids whose own edge finishes a row in its state, padded with `vocab_size`."""
        return self._end_ids[state_B]

    def can_end(self, state_B: Tensor) -> Tensor:
        """Rows that some id of the grammar would finish."""
        return (self._end_ids[state_B] < self.vocab_size).any(1)

    def _upload(self) -> None:
        states = [state for _, state in self._states]
        dummy = self.vocab_size  # column past the vocabulary, cut off again
        allowed = [state.allowed or () for state in states]
        self._allowed = self._padded(allowed, dummy)
        self._suppressed = self._padded([state.suppressed for state in states], dummy)
        self._end_ids = self._padded([state.end_ids for state in states], dummy)
        self._is_limited = self._tensor([state.allowed is not None for state in states], torch.bool)
        self._phase = self._tensor([state.phase for state in states])
        self._carries = self._tensor([int(state.carries) for state in states])
        self._when_spent = self._tensor([NO_ID if s.when_spent is None else s.when_spent for s in states])
        self._upload_edges()

    def _upload_edges(self) -> None:
        """Edge columns by id, then one last column for `otherwise`."""
        self._edge_id = self._padded([[i for i, _ in s.edges] for _, s in self._states], NO_ID)
        width = self._edge_id.shape[1]
        goto, emit = [], []
        for base, state in self._states:
            edges = [edge for _, edge in state.edges]
            edges += [state.otherwise] * (width + 1 - len(edges))
            goto.append([END if edge.goto == END else base + edge.goto for edge in edges])
            emit.append([NO_ID if edge.emit is None else edge.emit for edge in edges])
        self._edge_goto = self._tensor(goto or [[END]])
        self._edge_emit = self._tensor(emit or [[NO_ID]])

    def _padded(self, rows: list, fill: int) -> Tensor:
        width = max([1, *(len(row) for row in rows)])
        return self._tensor([[*row, *[fill] * (width - len(row))] for row in rows] or [[fill] * width])

    def _tensor(self, values: list, dtype: torch.dtype = torch.int64) -> Tensor:
        return upload(values, self._device, dtype)
