"""What each row has said so far, on the device, for presence, frequency and repetition penalties."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kestrel.kernels.penalties import Penalties, penalise
from kestrel.runtime.contract import RowStart
from kestrel.runtime.row_users import RowUsers
from kestrel.runtime.upload import upload


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
