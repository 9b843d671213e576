"""Which rows of a step use an option, so that the others pay nothing and are not touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kestrel.runtime.upload import upload


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
