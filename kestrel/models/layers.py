"""Layers that several parts of a model share."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def normal_parameter(*shape: int, std: float = 1.0) -> nn.Parameter:
    """Numbers of a bell curve; none on the meta device, where filling in pulls in torch's compiler: half a second."""
    parameter = nn.Parameter(torch.empty(*shape))
    if not parameter.is_meta:
        nn.init.normal_(parameter, std=std)
    return parameter


class GeluMlp(nn.Module):
    """fc2(gelu_tanh(fc1(x))), biases on both."""

    def __init__(self, in_dim: int, inner_dim: int, out_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_dim, inner_dim)
        self.fc2 = nn.Linear(inner_dim, out_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(functional.gelu(self.fc1(x), approximate="tanh"))
