"""Grammars as device tables, and the machine that advances every row of a step at once.

All grammars seen so far share one table; a row's state is an index into it. Ids are stored as short padded lists per
state, so the tables stay small however large the vocabulary is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kestrel.grammar import END, Grammar, State
from kestrel.runtime.upload import upload_tensor

NO_ID = -1
LEAST_STATES, LEAST_WIDTH = 64, 8
"""Sizes of the tables at the beginning."""
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
        self._tables: dict[str, Tensor] = {}
        self.version = 0
        """Changes when the tables have moved."""
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
        allowed_BA = self._tables["allowed"][state_B]
        limited.scatter_(1, allowed_BA, padded.gather(1, allowed_BA))
        masked = torch.where(self._tables["is_limited"][state_B][:, None].bool(), limited, padded)
        masked.scatter_(1, self._tables["suppressed"][state_B], -torch.inf)
        return masked[:, :-1]

    def advance(self, state_B: Tensor, sampled_B: Tensor, is_spent_B: Tensor) -> Advance:
        when_spent_B = self._tables["when_spent"][state_B]
        sampled_B = torch.where(is_spent_B & (when_spent_B != NO_ID), when_spent_B, sampled_B)
        hits_BE = self._tables["edge_id"][state_B] == sampled_B[:, None]
        edge_B = torch.where(hits_BE.any(1), hits_BE.int().argmax(1), hits_BE.shape[1])
        goto_B = self._tables["edge_goto"][state_B, edge_B]
        emit_B = self._tables["edge_emit"][state_B, edge_B]
        ended_B = goto_B == END
        next_B = torch.where(ended_B, state_B, goto_B)
        return Advance(
            sampled_B=sampled_B,
            emitted_B=torch.where(emit_B == NO_ID, sampled_B, emit_B),
            state_B=next_B,
            ended_B=ended_B,
            changes_phase_B=self._tables["phase"][next_B] != self._tables["phase"][state_B],
            carries_B=self._tables["carries"][state_B],
        )

    def ends_when_spent(self, state_B: Tensor) -> Tensor:
        """Rows that a spent phase finishes (the others are moved on by `when_spent`)."""
        return self._tables["when_spent"][state_B] == NO_ID

    def end_ids(self, state_B: Tensor) -> Tensor:
        """[B, E]: the ids whose own edge finishes a row in its state, padded with `vocab_size`."""
        return self._tables["end_ids"][state_B]

    def can_end(self, state_B: Tensor) -> Tensor:
        """Rows that some id of the grammar would finish."""
        return (self._tables["end_ids"][state_B] < self.vocab_size).any(1)

    def _upload(self) -> None:
        """Rewrites the tables, in place as long as they are large enough: captured graphs read them where they are."""
        states = [state for _, state in self._states]
        dummy = self.vocab_size  # column past the vocabulary, cut off again
        allowed = [state.allowed or () for state in states]
        edges = [[i for i, _ in state.edges] for state in states]
        fresh = {
            "allowed": self._padded(allowed, dummy),
            "suppressed": self._padded([state.suppressed for state in states], dummy),
            "end_ids": self._padded([state.end_ids for state in states], dummy),
            "is_limited": self._column([int(state.allowed is not None) for state in states], 0),
            "phase": self._column([state.phase for state in states], 0),
            "carries": self._column([int(state.carries) for state in states], 0),
            "when_spent": self._column([NO_ID if s.when_spent is None else s.when_spent for s in states], NO_ID),
            "edge_id": self._padded(edges, NO_ID),
        }
        fresh |= self._edge_ends(width=fresh["edge_id"].shape[1])
        if any(name not in self._tables or self._tables[name].shape != table.shape for name, table in fresh.items()):
            self._tables = {name: upload_tensor(table, self._device) for name, table in fresh.items()}
            self.version += 1
            return
        for name, table in fresh.items():
            self._tables[name].copy_(upload_tensor(table, self._device))

    def _edge_ends(self, width: int) -> dict[str, Tensor]:
        """Where edges lead and what they emit: columns by id, then one last column for `otherwise`."""
        goto, emit = [], []
        for base, state in self._states:
            edges = [edge for _, edge in state.edges]
            edges += [state.otherwise] * (width + 1 - len(edges))
            goto.append([END if edge.goto == END else base + edge.goto for edge in edges])
            emit.append([NO_ID if edge.emit is None else edge.emit for edge in edges])
        return {
            "edge_goto": _filled(goto, self._num_kept, width + 1, END),
            "edge_emit": _filled(emit, self._num_kept, width + 1, NO_ID),
        }

    @property
    def _num_kept(self) -> int:
        return _room_for(len(self._states), LEAST_STATES)

    def _padded(self, rows: list, fill: int) -> Tensor:
        width = _room_for(max((len(row) for row in rows), default=0), LEAST_WIDTH)
        return _filled(rows, self._num_kept, width, fill)

    def _column(self, values: list[int], fill: int) -> Tensor:
        return _filled([[value] for value in values], self._num_kept, 1, fill)[:, 0]


def _room_for(count: int, least: int) -> int:
    """A power of two, so that tables seldom have to move."""
    return max(least, 1 << max(0, count - 1).bit_length())


def _filled(rows: list, height: int, width: int, fill: int) -> Tensor:
    padded = [[*row, *[fill] * (width - len(row))] for row in rows]
    table = torch.full((height, width), fill, dtype=torch.int64)
    if padded:
        table[: len(padded)] = torch.tensor(padded, dtype=torch.int64)
    return table
