"""When a row may end: not before `min_tokens`, never by the end id with `ignore_eos`, also by its own stop ids.

Tokens are counted per phase, so thinking does not count towards the answer. Stop ids end a row in those states of its
grammar that an id of the grammar's own could end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kestrel.kernels.best_ids import forbid_ends
from kestrel.kernels.row_tables import EndingTensors
from kestrel.runtime.contract import RowStart
from kestrel.runtime.grammar_tables import GrammarTables
from kestrel.runtime.row_users import RowUsers
from kestrel.runtime.upload import upload
from kestrel.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams

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
