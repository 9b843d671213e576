"""A linear layer and the tanh form of GELU behind it: what feeds the second matrix of an MLP."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def gelu_linear(x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor) -> Tensor:
    """GELU_tanh(x · weightᵀ + bias), [T, F]."""
    assert x_TD.ndim == 2
    return functional.gelu(functional.linear(x_TD, weight_FD, bias_F), approximate="tanh")


def gelu_linear_epilogue(x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor) -> Tensor:
    """The same on a GPU, whose matrix product ends with the activation. On a CPU this call means the erf form."""
    assert x_TD.is_cuda
    return torch.ops.aten._addmm_activation(bias_F, x_TD, weight_FD.t(), use_gelu=True)
