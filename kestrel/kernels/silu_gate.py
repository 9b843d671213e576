"""The middle of a gated MLP: one product has made [gate | up] of each row.

    hidden = silu(gate) · up        silu(g) = g · sigmoid(g)

silu(gate) is rounded to the dtype of z before it is multiplied, as the published models do.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from kestrel.kernels.fp8_rows import rows_to_fp8


def silu_gate(z_TF: Tensor) -> Tensor:
    """hidden [T, F / 2]."""
    gate_TI, up_TI = z_TF.chunk(2, dim=-1)
    return functional.silu(gate_TI) * up_TI


def silu_gate_to_fp8(z_TF: Tensor) -> tuple[Tensor, Tensor]:
    """(hidden in float8 [T, F / 2], its scales [T, 1] fp32)."""
    return rows_to_fp8(silu_gate(z_TF))
