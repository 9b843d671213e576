"""Numbers that requests add to the scores of ids of their choice."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kestrel.runtime.contract import RowStart
from kestrel.runtime.row_users import RowUsers
from kestrel.runtime.upload import upload


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
