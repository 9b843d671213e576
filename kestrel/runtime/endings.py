"""When a row may end: not before `min_tokens`, never by the end id with `ignore_eos`, also by its own stop ids.

Tokens are counted per phase, so thinking does not count towards the answer. Stop ids end a row in those states of its
grammar that an id of the grammar's own could end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kestrel.request import MAX_STOP_TOKEN_IDS, SamplingParams
from kestrel.runtime.contract import RowStart
from kestrel.runtime.grammar_tables import Advance, GrammarTables
from kestrel.runtime.row_users import RowUsers, Users
from kestrel.runtime.upload import upload

NEVER = 2**31


class EndingTable:
    def __init__(self, num_rows: int, grammars: GrammarTables, device: torch.device) -> None:
        self._grammars = grammars
        self._device = device
        self._delayed = RowUsers(device)  # rows that may not end at once
        self._stopping = RowUsers(device)  # rows with stop ids
        self._ends_from_R = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._stops_from_R = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._stop_ids_RS = torch.full(
            (num_rows, MAX_STOP_TOKEN_IDS), grammars.vocab_size, dtype=torch.int64, device=device
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
            self._ends_from_R[start.row], self._stops_from_R[start.row] = numbers[0], numbers[1]
            self._stop_ids_RS[start.row] = numbers[2:]

    def forbid(self, scores_BV: Tensor, row_indices: Sequence[int], state_B: Tensor, spent_B: Tensor) -> Tensor:
        """Scores with the ids that would end a row too early at −inf, unless nothing else is left to sample."""
        users = self._delayed.among(row_indices)
        return scores_BV if users is None else self.forbid_for(users, scores_BV, state_B, spent_B)

    def forbid_for(self, users: Users, scores_BV: Tensor, state_B: Tensor, spent_B: Tensor) -> Tensor:
        """The same for given rows; those without such a wish keep their scores."""
        state_U, spent_U1 = state_B[users.at_U], spent_B[users.at_U][:, None]
        nothing = self._grammars.vocab_size  # a column past the vocabulary, cut off again
        ends_UE = self._grammars.end_ids(state_U)
        ends_UE = torch.where(spent_U1 < self._ends_from_R[users.rows_U][:, None], ends_UE, nothing)
        stops_early_U1 = spent_U1 < self._stops_from_R[users.rows_U][:, None]
        stops_early_U1 = stops_early_U1 & self._grammars.can_end(state_U)[:, None]
        stops_US = torch.where(stops_early_U1, self._stop_ids_RS[users.rows_U], nothing)
        scores_UV = scores_BV[users.at_U]
        padded = torch.nn.functional.pad(scores_UV, (0, 1))
        limited_UV = padded.scatter(1, torch.cat((ends_UE, stops_US), dim=1), -torch.inf)[:, :-1]
        must_end_U1 = limited_UV.amax(-1, keepdim=True).isneginf()
        return scores_BV.index_copy(0, users.at_U, torch.where(must_end_U1, scores_UV, limited_UV))

    def stop(self, step: Advance, row_indices: Sequence[int], state_B: Tensor) -> Advance:
        """The step with those rows ended that sampled one of their stop ids in `state_B`."""
        users = self._stopping.among(row_indices)
        return step if users is None else self.stop_for(users, step, state_B)

    def stop_for(self, users: Users, step: Advance, state_B: Tensor) -> Advance:
        """The same for given rows; those without stop ids go on."""
        hits_U = (self._stop_ids_RS[users.rows_U] == step.sampled_B[users.at_U][:, None]).any(1)
        hits_U = hits_U & self._grammars.can_end(state_B[users.at_U])
        stopped_B = torch.zeros_like(step.ended_B).index_copy(0, users.at_U, hits_U)
        return replace(
            step,
            ended_B=step.ended_B | stopped_B,
            state_B=torch.where(stopped_B, state_B, step.state_B),
            changes_phase_B=step.changes_phase_B & ~stopped_B,
        )


def delays_end(sampling: SamplingParams) -> bool:
    return sampling.ignore_eos or sampling.min_tokens > 0
