"""What the device remembers of each row between steps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kestrel.grammar import Carries, Grammar
from kestrel.kernels.row_tables import DrawingRows
from kestrel.runtime.contract import PageWrite, RowStart
from kestrel.runtime.device import upload
from kestrel.runtime.grammar_tables import MAX_KEPT_STATES, GrammarTables
from kestrel.runtime.sampling_options import EndingTable, LogitBiasTable, PenaltyTable


@dataclass(slots=True)
class HostRow:
    """What the host needs to know of a row to skip work that no row of a step asks for."""

    grammar: Grammar | None = None
    grammar_base: int = 0
    carries: Carries = Carries.NOTHING
    samples_randomly: bool = False
    logprobs: int | None = None
    has_id_limits: bool = False
    adapter_slot: int | None = None


@dataclass(slots=True)
class RowTensors(DrawingRows):
    """Beside it, what a row computes with."""

    adapter_slot: Tensor
    """-1 for the base model."""


@dataclass(slots=True)
class RowTable:
    """Rows by index. Integers of a start travel in one copy, numbers in another."""

    num_rows: int
    max_pages_per_row: int
    spare_page: int
    """Where entries of a batch that are no row write."""
    vocab_size: int
    grammars: GrammarTables
    device: torch.device
    tensors: RowTensors = field(init=False)
    pages: Tensor = field(init=False)  # [rows, max pages]
    host: list[HostRow] = field(init=False)
    penalties: PenaltyTable = field(init=False)
    logit_bias: LogitBiasTable = field(init=False)
    endings: EndingTable = field(init=False)
    id_limits: Tensor | None = field(init=False, default=None)  # [rows, vocab], true where an id may be sampled

    def __post_init__(self) -> None:
        def integers(*shape: int) -> Tensor:
            return torch.zeros(self.num_rows + 1, *shape, dtype=torch.int64, device=self.device)

        def numbers(*shape: int) -> Tensor:
            return torch.zeros(self.num_rows + 1, *shape, dtype=torch.float32, device=self.device)

        self.tensors = RowTensors(
            last_id=integers(),
            last_kind=integers(),
            last_value=numbers(2),
            state=integers(),
            spent=integers(),
            generated=integers(),
            budget=integers(),
            max_total=integers(),
            seed=integers(),
            temperature=numbers(),
            top_k=integers(),
            top_p=numbers(),
            min_p=numbers(),
            adapter_slot=integers() - 1,
        )
        self.pages = integers(self.max_pages_per_row)
        self.pages[self.spare_row] = self.spare_page
        self.host = [HostRow() for _ in range(self.num_rows)]
        self.penalties = PenaltyTable(self.num_rows, self.vocab_size, self.device)
        self.logit_bias = LogitBiasTable(self.num_rows, self.vocab_size, self.device)
        self.endings = EndingTable(self.num_rows + 1, self.grammars, self.device)

    @property
    def spare_row(self) -> int:
        """The row of entries that only fill up a batch."""
        return self.num_rows

    def apply_starts(self, starts: list[RowStart]) -> None:
        if not starts:
            return
        for start in starts:
            self._note_on_host(start)
            self.penalties.start(start)
            self.logit_bias.start(start)
            self.endings.start(start)
        rows = upload([start.row for start in starts], self.device)
        integers = upload([self._integers(start) for start in starts], self.device)
        numbers = upload([self._numbers(start) for start in starts], self.device)
        t = self.tensors
        columns = (t.state, t.spent, t.generated, t.budget, t.max_total, t.seed, t.top_k, t.adapter_slot)
        for column, tensor in enumerate(columns):
            tensor[rows] = integers[:, column]
        for column, tensor in enumerate((t.temperature, t.top_p, t.min_p)):
            tensor[rows] = numbers[:, column]

    def apply_page_writes(self, writes: list[PageWrite]) -> None:
        if writes:
            cells = [(w.row, w.index + i, page) for w in writes for i, page in enumerate(w.pages)]
            table = upload(cells, self.device)
            self.pages[table[:, 0], table[:, 1]] = table[:, 2]

    def _note_on_host(self, start: RowStart) -> None:
        sampling = start.sampling
        if self.grammars.num_states + len(start.grammar.states) > MAX_KEPT_STATES:
            self._forget_unused_grammars()
        self.host[start.row] = HostRow(
            grammar=start.grammar,
            grammar_base=self.grammars.base_of(start.grammar),
            carries=start.grammar.carries,
            samples_randomly=sampling.temperature > 0.0,
            logprobs=sampling.logprobs,
            has_id_limits=bool(sampling.allowed_ids or sampling.suppressed_ids),
            adapter_slot=start.adapter_slot,
        )
        if self.host[start.row].has_id_limits:
            self._write_id_limits(start)

    def _forget_unused_grammars(self) -> None:
        """Keep only the grammars of the rows, and move the rows' states along. Steps in flight keep their own notes."""
        self.grammars.clear()
        moves = [0] * (self.num_rows + 1)
        for index, row in enumerate(self.host):
            if row.grammar is not None:
                base = self.grammars.base_of(row.grammar)
                moves[index] = base - row.grammar_base
                self.host[index] = replace(row, grammar_base=base)
        self.tensors.state += upload(moves, self.device)
        self.tensors.state[self.spare_row] = 0

    def _write_id_limits(self, start: RowStart) -> None:
        allowed, suppressed = start.sampling.allowed_ids, start.sampling.suppressed_ids
        if self.id_limits is None:
            self.id_limits = torch.ones(self.num_rows, self.vocab_size, dtype=torch.bool, device=self.device)
        assert self.id_limits is not None
        limits = torch.full((self.vocab_size,), not allowed, dtype=torch.bool)
        limits[list(allowed)] = True
        limits[list(suppressed)] = False
        self.id_limits[start.row] = limits.to(self.device)

    def _integers(self, start: RowStart) -> tuple[int, ...]:
        return (
            self.host[start.row].grammar_base + start.grammar_state,
            start.phase_spent,
            start.num_generated,
            start.sampling.max_new_tokens,
            start.max_total_tokens,
            start.sampling.seed,
            start.sampling.top_k,
            -1 if start.adapter_slot is None else start.adapter_slot,
        )

    def _numbers(self, start: RowStart) -> tuple[float, ...]:
        return (start.sampling.temperature, start.sampling.top_p, start.sampling.min_p)
