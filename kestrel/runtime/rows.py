"""What the device remembers of each row between steps: its grammar, its last token, and what its request asked of the
choice of tokens.

All grammars seen so far share one table; a row's state is an index into it. Ids are stored as short padded lists per
state, so the tables stay small however large the vocabulary is. Each sampling option knows which rows of a step use it,
so that the others pay nothing and are not touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kestrel.grammar import END, Carries, Grammar, State
from kestrel.kernels.row_tables import (
    BIAS,
    END_STATE,
    ID_LIMITS,
    MASK,
    NO_ID,
    PENALTIES,
    DrawingRows,
    EndingTensors,
    GrammarTensors,
    ScoreWishes,
)
from kestrel.kernels.sampling import WORD, forbid_ends
from kestrel.runtime.contract import PageWrite, RowStart
from kestrel.runtime.device import upload, upload_tensor
from kestrel.settings import MAX_STOP_TOKEN_IDS, SamplingParams

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


# ---------------------------------------------------------------------- rows


@dataclass(slots=True)
class HostRow:
    """What the host needs to know of a row to skip work that no row of a step asks for."""

    grammar: Grammar | None = None
    grammar_base: int = 0
    carries: Carries = Carries.NOTHING
    samples_randomly: bool = False
    logprobs: int | None = None
    adapter_slot: int | None = None


@dataclass(slots=True)
class RowTensors(DrawingRows):
    """Beside it, what a row computes with."""

    adapter_slot: Tensor
    """-1 for the base model."""


def _aligned(num_rows: int) -> int:
    """So many that what follows lies at a multiple of 16 bytes, as kernels are compiled for."""
    return -(-num_rows // 4) * 4


INTEGERS = ("state", "spent", "generated", "budget", "max_total", "seed", "top_k", "adapter_slot")
NUMBERS = ("temperature", "top_p", "min_p")
"""Of `RowTensors`, those that a start writes."""


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
    _integers_CR: Tensor = field(init=False)
    _numbers_CR: Tensor = field(init=False)
    host: list[HostRow] = field(init=False)
    wishes: WishTable = field(init=False)
    endings: EndingTable = field(init=False)

    def __post_init__(self) -> None:
        def integers(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=self.device)

        # What a start writes lies together: a launch for each kind of number.
        num_all = self.num_rows + 1
        self._integers_CR = integers(len(INTEGERS), _aligned(num_all))[:, :num_all]
        numbers_CR = torch.zeros(len(NUMBERS), _aligned(num_all), dtype=torch.float32, device=self.device)
        self._numbers_CR = numbers_CR[:, :num_all]
        self.tensors = RowTensors(
            last_id=integers(num_all),
            last_kind=integers(num_all),
            last_value=torch.zeros(num_all, 2, dtype=torch.float32, device=self.device),
            **dict(zip(INTEGERS, self._integers_CR, strict=True)),
            **dict(zip(NUMBERS, self._numbers_CR, strict=True)),
        )
        self.tensors.adapter_slot.fill_(-1)
        self.pages = integers(num_all, self.max_pages_per_row)
        self.pages[self.spare_row] = self.spare_page
        self.host = [HostRow() for _ in range(self.num_rows)]
        self.wishes = WishTable(self.num_rows, self.vocab_size, self.device)
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
        self.wishes.start(starts)
        self.endings.start(starts)
        rows = upload([start.row for start in starts], self.device)
        integers = upload([n for start in starts for n in self._integers(start)], self.device).view(len(starts), -1)
        numbers = upload([self._numbers(start) for start in starts], self.device)
        self._integers_CR[:, rows] = integers.T
        self._numbers_CR[:, rows] = numbers.T

    def apply_page_writes(self, writes: list[PageWrite]) -> None:
        if writes:
            rows: list[int] = []
            places: list[int] = []
            pages: list[int] = []
            for write in writes:
                rows += [write.row] * len(write.pages)
                places += range(write.index, write.index + len(write.pages))
                pages += write.pages
            rows_N, places_N, pages_N = upload(rows + places + pages, self.device).view(3, -1)
            self.pages[rows_N, places_N] = pages_N

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
            adapter_slot=start.adapter_slot,
        )

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

    def _integers(self, start: RowStart) -> tuple[int, ...]:
        """In the order of `INTEGERS`."""
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
        """In the order of `NUMBERS`."""
        return (start.sampling.temperature, start.sampling.top_p, start.sampling.min_p)


# ---------------------------------------------------------------------- sampling options


@dataclass(frozen=True, slots=True)
class Users:
    """The U entries of a step's B whose rows use an option: where they stand in the step, and which rows they are."""

    at_U: Tensor
    rows_U: Tensor


class RowUsers:
    """The rows that use one option."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: set[int] = set()

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def any_among(self, row_indices: Sequence[int]) -> bool:
        return any(row in self._rows for row in row_indices)

    def note(self, row: int, uses: bool) -> None:
        if uses:
            self._rows.add(row)
        else:
            self._rows.discard(row)

    def among(self, row_indices: Sequence[int]) -> Users | None:
        """None when no row of the step uses the option."""
        pairs = [(b, row) for b, row in enumerate(row_indices) if row in self._rows]
        if not pairs:
            return None
        table = upload(pairs, self._device)
        return Users(table[:, 0], table[:, 1])


# ---------------------------------------------------------------------- wishes about scores


class WishTable:
    """Penalties, biases, masks of structured answers and limits of ids, by row. Buffers appear with the first row that
    needs them."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """One more row is for entries that only fill up a batch."""
        self._shape = (num_rows + 1, vocab_size)
        self._num_words = -(-vocab_size // WORD)
        self._device = device
        self._kinds = [0] * (num_rows + 1)
        self._seen = 0
        self._masked: set[int] = set()
        self._tensors: dict[str, Tensor] = {}
        self._kinds_R = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)

    def among(self, row_indices: Sequence[int]) -> int:
        """0 where no row has a wish; otherwise every kind that some row ever had, as bits. A row does not pay for kinds
        of others, and so mixtures do not multiply what is captured."""
        return self._seen if any(self._kinds[row] for row in row_indices) else 0

    def users_among(self, row_indices: Sequence[int]) -> Users | None:
        pairs = [(b, row) for b, row in enumerate(row_indices) if self._kinds[row]]
        if not pairs:
            return None
        at_U, rows_U = upload(pairs, self._device).unbind(1)
        return Users(at_U.contiguous(), rows_U.contiguous())

    def tensors(self, kinds: int) -> ScoreWishes:
        """What scores of these kinds are made from."""
        names: list[str] = []
        for kind, own in NAMES_BY_KIND.items():
            names += own if kinds & kind else ()
        return ScoreWishes(self._kinds_R, **{name: self._buffer(name) for name in names})

    def start(self, starts: Sequence[RowStart]) -> None:
        changed: list[tuple[int, int]] = []
        for start in starts:
            sampling, kinds = start.sampling, 0
            if sampling.has_penalties:
                kinds |= PENALTIES
                self._count_anew(start)
            if sampling.logit_bias:
                kinds |= BIAS
                self._write_bias(start.row, sampling.logit_bias)
            if sampling.allowed_ids or sampling.suppressed_ids:
                kinds |= ID_LIMITS
                self._buffer("limits_RW")[start.row] = self._words(_limits(sampling, self._shape[1]))
            self._masked.discard(start.row)
            if kinds != self._kinds[start.row]:
                changed.append((start.row, kinds))
        self._write_kinds(changed)

    def set_masks(self, masks: Mapping[int, bytes]) -> None:
        """Those of the coming step. Bit k % 8 of byte k // 8 stands for id k; ids past the end are forbidden."""
        if masks:
            num_bytes = WORD // 8 * self._num_words
            packed = bytearray().join(mask[:num_bytes].ljust(num_bytes, b"\0") for mask in masks.values())
            words = torch.frombuffer(packed, dtype=torch.int32).view(len(masks), self._num_words)
            rows = upload(list(masks), self._device)
            self._buffer("mask_RW")[rows] = upload_tensor(words, self._device)
        changed = [(row, self._kinds[row] & ~MASK) for row in self._masked if row not in masks]
        changed += [(row, self._kinds[row] | MASK) for row in masks if row not in self._masked]
        self._masked = set(masks)
        self._write_kinds(changed)

    def count(self, kinds: int, rows_B: Tensor, emitted_B: Tensor, is_text_B: Tensor) -> None:
        """Notes what this step emitted; coordinates and sizes are no words."""
        if kinds & PENALTIES:
            counts = self._buffer("counts_RV")
            is_counted_B = is_text_B & ((self._kinds_R[rows_B] & PENALTIES) != 0)
            counts.view(-1).index_add_(0, rows_B * self._shape[1] + emitted_B, is_counted_B.to(counts.dtype))

    def _write_kinds(self, changed: list[tuple[int, int]]) -> None:
        if changed:
            for row, kinds in changed:
                self._kinds[row] = kinds
                self._seen |= kinds
            rows, kinds = upload(changed, self._device).unbind(1)
            self._kinds_R[rows] = kinds.to(self._kinds_R.dtype)

    def _count_anew(self, start: RowStart) -> None:
        """From what its start says was said before."""
        sampling, row, device = start.sampling, start.row, self._device
        how = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
        self._buffer("penalties_R3")[row] = upload(how, device, torch.float32)
        in_prompt_V, counts_V = self._buffer("in_prompt_RV")[row], self._buffer("counts_RV")[row]
        in_prompt_V.zero_()
        in_prompt_V[upload(start.prompt_ids, device, torch.int64)] = True
        said = upload(start.generated_ids, device, torch.int64)
        counts_V.zero_().index_add_(0, said, torch.ones(len(said), device=device))

    def _write_bias(self, row: int, bias: Sequence[tuple[int, float]]) -> None:
        ids = upload([token_id for token_id, _ in bias], self._device)
        bias_V = self._buffer("bias_RV")[row].zero_()
        bias_V[ids] = upload([value for _, value in bias], self._device, torch.float32)

    def _words(self, allowed_V: Tensor) -> Tensor:
        padded = functional.pad(allowed_V, (0, WORD * self._num_words - len(allowed_V)))
        packed = np.packbits(padded.numpy(), bitorder="little").view(np.int32)
        return upload_tensor(torch.from_numpy(packed), self._device)

    def _buffer(self, name: str) -> Tensor:
        if name not in self._tensors:
            width, dtype = {
                "penalties_R3": (3, torch.float32),
                "in_prompt_RV": (self._shape[1], torch.bool),
                "mask_RW": (self._num_words, torch.int32),
                "limits_RW": (self._num_words, torch.int32),
            }.get(name, (self._shape[1], torch.float32))
            self._tensors[name] = torch.zeros(self._shape[0], width, dtype=dtype, device=self._device)
        return self._tensors[name]


def sampling_bytes(num_rows: int, vocab_size: int) -> int:
    """The most that logits, scores and the tables of all wishes take together."""
    logits, scores, counts, bias, in_prompt = 2, 4, 4, 4, 1
    masks = 2 * -(-vocab_size // WORD) * (WORD // 8)
    return num_rows * ((logits + scores + counts + bias + in_prompt) * vocab_size + masks)


NAMES_BY_KIND = {
    PENALTIES: ("penalties_R3", "in_prompt_RV", "counts_RV"),
    BIAS: ("bias_RV",),
    MASK: ("mask_RW",),
    ID_LIMITS: ("limits_RW",),
}
"""Of the fields of `ScoreWishes`."""


def _limits(sampling: SamplingParams, vocab_size: int) -> Tensor:
    """Whether each id may be sampled."""
    allowed_V = torch.full((vocab_size,), not sampling.allowed_ids, dtype=torch.bool)
    allowed_V[list(sampling.allowed_ids)] = True
    allowed_V[list(sampling.suppressed_ids)] = False
    return allowed_V


# ---------------------------------------------------------------------- ends
# Not before `min_tokens`, never by the end id with `ignore_eos`, also by a row's own stop ids. Tokens are counted per
# phase, so thinking does not count towards the answer. Stop ids end a row in those states of its grammar that an id of
# the grammar's own could end.


NEVER = 2**31


class EndingTable:
    def __init__(self, num_rows: int, grammars: GrammarTables, device: torch.device) -> None:
        self._grammars = grammars
        self._device = device
        self._delayed = RowUsers(device)  # rows that may not end at once
        self._stopping = RowUsers(device)  # rows with stop ids
        no_ids_RS = torch.full((num_rows, MAX_STOP_TOKEN_IDS), grammars.vocab_size, dtype=torch.int64, device=device)
        self._from_2R = torch.zeros(2, _aligned(num_rows), dtype=torch.int64, device=device)[:, :num_rows]
        self.tensors = EndingTensors(ends_from_R=self._from_2R[0], stops_from_R=self._from_2R[1], stop_ids_RS=no_ids_RS)

    def any_among(self, row_indices: Sequence[int]) -> bool:
        """Whether some row has a wish about its end."""
        return any(row in self._delayed or row in self._stopping for row in row_indices)

    def start(self, starts: Sequence[RowStart]) -> None:
        changed: list[int] = []
        for start in starts:
            sampling = start.sampling
            delays, stops = delays_end(sampling), bool(sampling.stop_token_ids)
            if delays or stops or self.any_among([start.row]):
                ids = sampling.stop_token_ids
                padding = [self._grammars.vocab_size] * (MAX_STOP_TOKEN_IDS - len(ids))
                ends_from = NEVER if sampling.ignore_eos else sampling.min_tokens
                changed += [start.row, ends_from, sampling.min_tokens, *ids, *padding]
            self._delayed.note(start.row, delays)
            self._stopping.note(start.row, stops)
        if changed:
            numbers_NK = upload(changed, self._device).view(-1, 3 + MAX_STOP_TOKEN_IDS)
            rows_N = numbers_NK[:, 0]
            self._from_2R[:, rows_N] = numbers_NK[:, 1:3].T
            self.tensors.stop_ids_RS[rows_N] = numbers_NK[:, 3:]

    def forbid(self, scores_BV: Tensor, row_indices: Sequence[int], state_B: Tensor, spent_B: Tensor) -> Tensor:
        """Scores with the ids that would end a row too early at −inf, unless nothing else is left to sample."""
        users = self._delayed.among(row_indices)
        if users is None:
            return scores_BV
        at_U, rows_U = users.at_U, users.rows_U
        limited_UV = forbid_ends(
            scores_BV[at_U], rows_U, state_B[at_U], spent_B[at_U], self._grammars.tensors, self.tensors
        )
        return scores_BV.index_copy(0, at_U, limited_UV)

    def stops_any_of(self, row_indices: Sequence[int]) -> bool:
        """Whether some row has stop ids."""
        return self._stopping.any_among(row_indices)


def delays_end(sampling: SamplingParams) -> bool:
    return sampling.ignore_eos or sampling.min_tokens > 0
