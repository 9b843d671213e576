"""Low-rank deltas of several adapters in one batch.

    y[n] += b[slot(n)] · (a[slot(n)] · x[n])        for every row n that has a slot

Rows without a slot keep y bit by bit. An adapter may have a lower rank than the buffers: it uses the first `rank` rows
of `a` and columns of `b`. The two products run in the dtype of x, one adapter after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class SlotRows:
    """The rows of a batch that use one slot; known on the host, so that nothing waits for the device."""

    slot: int
    rank: int
    rows_N: Tensor


def add_low_rank(y_TF: Tensor, x_TD: Tensor, users: Sequence[SlotRows], a_SRD: Tensor, b_SFR: Tensor) -> Tensor:
    """y with the deltas added, in place."""
    assert y_TF.shape == (x_TD.shape[0], b_SFR.shape[1])
    assert a_SRD.shape[1:] == (b_SFR.shape[2], x_TD.shape[1])
    for user in users:
        if user.rank > 0:
            x_ND = x_TD[user.rows_N]
            y_TF.index_add_(
                0, user.rows_N, low_rank(x_ND, a_SRD[user.slot, : user.rank], b_SFR[user.slot, :, : user.rank])
            )
    return y_TF


def low_rank(x_ND: Tensor, a_RD: Tensor, b_FR: Tensor) -> Tensor:
    """The delta of one adapter."""
    return functional.linear(functional.linear(x_ND, a_RD), b_FR)
