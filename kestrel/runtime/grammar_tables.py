"""Grammars as device tables, for `kestrel.kernels.sampling` and `kestrel.kernels.commit_ids`.

All grammars seen so far share one table; a row's state is an index into it. Ids are stored as short padded lists per
state, so the tables stay small however large the vocabulary is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kestrel.grammar import END, Grammar, State
from kestrel.kernels.row_tables import END_STATE, NO_ID, GrammarTensors
from kestrel.runtime.device import upload_tensor

LEAST_STATES, LEAST_WIDTH = 64, 8
"""Sizes of the tables at the beginning."""
MAX_KEPT_STATES = 8192
"""States kept before those of grammars that no row uses are dropped."""


class GrammarTables:
    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self._device = device
        self._base: dict[Grammar, int] = {}
        self._rooms: dict[str, int] = {}  # rows and widths of the tables, which never become less
        self._states: list[tuple[int, State]] = []  # (index of the grammar's first state, state)
        self.tensors = self._filled_tensors()
        self.version = 0
        """Changes when the tensors are others."""

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

    def _upload(self) -> None:
        """Rewrites the tensors, in place as long as they are large enough: captured graphs read them where they are."""
        fresh = self._filled_tensors()
        pairs = list(zip(self.tensors.tables, fresh.tables, strict=True))
        if any(old.shape != new.shape for old, new in pairs):
            self.tensors = fresh
            self.version += 1
            return
        for old, new in pairs:
            old.copy_(new)

    def _filled_tensors(self) -> GrammarTensors:
        states = [state for _, state in self._states]
        edge_id_NE = self._padded("edge_id", [[i for i, _ in state.edges] for state in states], NO_ID)
        goto, emit = self._edge_ends(width=edge_id_NE.shape[1])
        return GrammarTensors(
            vocab_size=self.vocab_size,
            allowed_NA=self._padded("allowed", [state.allowed or () for state in states], self.vocab_size),
            suppressed_NS=self._padded("suppressed", [state.suppressed for state in states], self.vocab_size),
            end_ids_NF=self._padded("end_ids", [state.end_ids for state in states], self.vocab_size),
            is_limited_N=self._column([int(state.allowed is not None) for state in states], 0),
            phase_N=self._column([state.phase for state in states], 0),
            carries_N=self._column([int(state.carries) for state in states], 0),
            when_spent_N=self._column([NO_ID if s.when_spent is None else s.when_spent for s in states], NO_ID),
            edge_id_NE=edge_id_NE,
            edge_goto=goto,
            edge_emit=emit,
        )

    def _edge_ends(self, width: int) -> tuple[Tensor, Tensor]:
        """Where edges lead and what they emit: columns by id, then one last column for `otherwise`."""
        goto, emit = [], []
        for base, state in self._states:
            edges = [edge for _, edge in state.edges]
            edges += [state.otherwise] * (width + 1 - len(edges))
            goto.append([END_STATE if edge.goto == END else base + edge.goto for edge in edges])
            emit.append([NO_ID if edge.emit is None else edge.emit for edge in edges])
        return self._table(goto, width + 1, END_STATE), self._table(emit, width + 1, NO_ID)

    def _padded(self, name: str, rows: list, fill: int) -> Tensor:
        return self._table(rows, self._room(name, max((len(row) for row in rows), default=0), LEAST_WIDTH), fill)

    def _column(self, values: list[int], fill: int) -> Tensor:
        return self._table([[value] for value in values], 1, fill)[:, 0]

    def _table(self, rows: list, width: int, fill: int) -> Tensor:
        num_kept = self._room("states", len(self._states), LEAST_STATES)
        return upload_tensor(_filled(rows, num_kept, width, fill), self._device)

    def _room(self, name: str, count: int, least: int) -> int:
        """A power of two, so that tables seldom have to move."""
        power = 1 << max(0, count - 1).bit_length()
        self._rooms[name] = max(least, power, self._rooms.get(name, 0))
        return self._rooms[name]


def _filled(rows: list, height: int, width: int, fill: int) -> Tensor:
    padded = [[*row, *[fill] * (width - len(row))] for row in rows]
    table = torch.full((height, width), fill, dtype=torch.int64)
    if padded:
        table[: len(padded)] = torch.tensor(padded, dtype=torch.int64)
    return table
