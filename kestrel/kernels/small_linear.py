"""A linear layer for a handful of rows, with what often follows it.

    y = x · (scale · weight)ᵀ + bias;  y[:, gelu_from:] = GELU_tanh of itself;  y += residual

`gelu_from` lets one matrix serve two layers that read the same x, of which the second has an activation ([qkv | fc1]);
with `gelu_rows_M` (bool) only these rows get it, for the others something else comes first.
`scale_F` holds a factor per output for weights kept in float8.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def small_linear(
    x_MD: Tensor,
    weight_FD: Tensor,
    bias_F: Tensor | None = None,
    residual_MF: Tensor | None = None,
    gelu_from: int | None = None,
    scale_F: Tensor | None = None,
    gelu_rows_M: Tensor | None = None,
) -> Tensor:
    """y [M, F] in the dtype of x."""
    assert x_MD.ndim == weight_FD.ndim == 2
    if scale_F is not None:
        weight_FD = (weight_FD.float() * scale_F[:, None]).to(x_MD.dtype)
    y_MF = functional.linear(x_MD, weight_FD, bias_F)
    if gelu_from is not None:
        active_MF = functional.gelu(y_MF[:, gelu_from:], approximate="tanh")
        if gelu_rows_M is not None:
            active_MF = torch.where(gelu_rows_M[:, None], active_MF, y_MF[:, gelu_from:])
        y_MF = active_MF if gelu_from == 0 else torch.cat((y_MF[:, :gelu_from], active_MF), dim=1)
    return y_MF if residual_MF is None else y_MF + residual_MF
