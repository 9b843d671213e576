"""What requests may ask of the choice of tokens beside temperature: penalties, biases, masks and ends, on the device.

Each option knows which rows of a step use it, so that the others pay nothing and are not touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kestrel.kernels.row_tables import EndingTensors
from kestrel.kernels.sampling import Penalties, forbid_ends, penalise
from kestrel.runtime.contract import RowStart
from kestrel.runtime.device import upload, upload_tensor
from kestrel.runtime.rows import GrammarTables
from kestrel.settings import MAX_STOP_TOKEN_IDS, SamplingParams


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


# ---------------------------------------------------------------------- penalties


class PenaltyTable:
    """Counts are kept per row and id, only for rows with penalties; the buffers appear with the first such row."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (num_rows, vocab_size)
        self._device = device
        self._users = RowUsers(device)
        self._how_R3 = torch.zeros(num_rows, 3, device=device)
        self._in_prompt_RV: Tensor | None = None
        self._counts_RV: Tensor | None = None

    def any_among(self, row_indices: Sequence[int]) -> bool:
        return self._users.any_among(row_indices)

    def start(self, start: RowStart) -> None:
        """(Re)count a row from what its start says was said before."""
        sampling = start.sampling
        self._users.note(start.row, sampling.has_penalties)
        if not sampling.has_penalties:
            return
        in_prompt_RV, counts_RV = self._buffers()
        how = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
        self._how_R3[start.row] = upload(how, self._device, torch.float32)
        in_prompt_RV[start.row] = False
        in_prompt_RV[start.row, upload(start.prompt_ids, self._device, torch.int64)] = True
        counts_RV[start.row] = 0.0
        said = upload(start.generated_ids, self._device, torch.int64)
        counts_RV[start.row].index_add_(0, said, torch.ones(len(said), device=self._device))

    def apply(self, logits_BV: Tensor, row_indices: Sequence[int]) -> Tensor:
        """Scores after penalties; those of rows without stay bit for bit."""
        users = self._users.among(row_indices)
        if users is None:
            return logits_BV
        in_prompt_RV, counts_RV = self._buffers()
        how = Penalties(*self._how_R3[users.rows_U].unbind(1))
        logits_UV = logits_BV[users.at_U]
        scores_UV = penalise(logits_UV, in_prompt_RV[users.rows_U], counts_RV[users.rows_U], how)
        return logits_BV.index_copy(0, users.at_U, scores_UV)

    def count(self, row_indices: Sequence[int], emitted_B: Tensor, is_text_B: Tensor) -> None:
        """Note what this step emitted; coordinates and sizes are no words."""
        users = self._users.among(row_indices)
        if users is not None:
            counts_RV = self._buffers()[1]
            once_U = is_text_B[users.at_U].to(counts_RV.dtype)
            counts_RV.index_put_((users.rows_U, emitted_B[users.at_U]), once_U, accumulate=True)

    def _buffers(self) -> tuple[Tensor, Tensor]:
        if self._in_prompt_RV is None or self._counts_RV is None:
            self._in_prompt_RV = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
            self._counts_RV = torch.zeros(self._shape, device=self._device)
        return self._in_prompt_RV, self._counts_RV


# ---------------------------------------------------------------------- logit bias


class LogitBiasTable:
    """One number per row and id; the buffer appears with the first row that has a bias."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (num_rows, vocab_size)
        self._device = device
        self._users = RowUsers(device)
        self._bias_RV: Tensor | None = None

    def any_among(self, row_indices: Sequence[int]) -> bool:
        return self._users.any_among(row_indices)

    def start(self, start: RowStart) -> None:
        bias = start.sampling.logit_bias
        self._users.note(start.row, bool(bias))
        if not bias:
            return
        if self._bias_RV is None:
            self._bias_RV = torch.zeros(self._shape, device=self._device)
        self._bias_RV[start.row] = 0.0
        ids = upload([token_id for token_id, _ in bias], self._device)
        self._bias_RV[start.row, ids] = upload([value for _, value in bias], self._device, torch.float32)

    def apply(self, logits_BV: Tensor, row_indices: Sequence[int]) -> Tensor:
        users = self._users.among(row_indices)
        if users is None:
            return logits_BV
        assert self._bias_RV is not None
        return logits_BV.index_add(0, users.at_U, self._bias_RV[users.rows_U])


# ---------------------------------------------------------------------- masks of grammars


def apply_masks(logits_BV: Tensor, row_indices: Sequence[int], masks: Mapping[int, bytes]) -> Tensor:
    """Logits with −inf where a row's mask forbids an id; row b of the logits belongs to row_indices[b].

    Bit k % 8 of byte k // 8 stands for id k; ids past the end of a mask are forbidden. Other rows stay as they are.
    """
    masked = [b for b, row in enumerate(row_indices) if row in masks]
    if not masked:
        return logits_BV
    vocab_size, device = logits_BV.shape[1], logits_BV.device
    num_bytes = -(-vocab_size // 8)
    packed = bytearray().join(masks[row_indices[b]][:num_bytes].ljust(num_bytes, b"\0") for b in masked)
    packed_MP = upload_tensor(torch.frombuffer(packed, dtype=torch.uint8).view(len(masked), num_bytes), device)
    bits_8 = torch.arange(8, dtype=torch.uint8, device=device)
    allowed_MV = (packed_MP[:, :, None] >> bits_8 & 1).view(len(masked), -1)[:, :vocab_size].bool()
    masked_M = upload(masked, device)
    return logits_BV.index_copy(0, masked_M, logits_BV[masked_M].masked_fill(~allowed_MV, -torch.inf))


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
        self.tensors = EndingTensors(
            ends_from_R=torch.zeros(num_rows, dtype=torch.int64, device=device),
            stops_from_R=torch.zeros(num_rows, dtype=torch.int64, device=device),
            stop_ids_RS=no_ids_RS,
        )

    def any_among(self, row_indices: Sequence[int]) -> bool:
        """Whether some row has a wish about its end."""
        return any(row in self._delayed or row in self._stopping for row in row_indices)

    def start(self, start: RowStart) -> None:
        sampling = start.sampling
        delays, stops = delays_end(sampling), bool(sampling.stop_token_ids)
        had_any = start.row in self._delayed or start.row in self._stopping
        self._delayed.note(start.row, delays)
        self._stopping.note(start.row, stops)
        if delays or stops or had_any:
            ids = sampling.stop_token_ids
            padding = [self._grammars.vocab_size] * (MAX_STOP_TOKEN_IDS - len(ids))
            ends_from = NEVER if sampling.ignore_eos else sampling.min_tokens
            numbers = upload([ends_from, sampling.min_tokens, *ids, *padding], self._device)
            own = self.tensors
            own.ends_from_R[start.row], own.stops_from_R[start.row] = numbers[0], numbers[1]
            own.stop_ids_RS[start.row] = numbers[2:]

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
