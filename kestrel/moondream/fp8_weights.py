"""From matrices of the model to float8, one scale per output; what they were made from is given up."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kestrel.errors import ConfigError
from kestrel.kernels.fp8_linear import weights_to_fp8
from kestrel.kernels.ops import Ops
from kestrel.moondream.moe import MoeMlp


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Rows in float8 and their scales [T, 1]."""

    numbers: Tensor
    scale_T1: Tensor


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """weight ≈ scale · numbers, row by row."""

    numbers_FD: Tensor
    scale_F: Tensor

    @classmethod
    def of(cls, weight_FD: Tensor) -> Fp8Matrix:
        return cls(*weights_to_fp8(weight_FD))

    def rows(self, chosen: slice) -> Fp8Matrix:
        return Fp8Matrix(self.numbers_FD[chosen], self.scale_F[chosen])

    def columns(self, chosen: slice) -> Fp8Matrix:
        return Fp8Matrix(self.numbers_FD[:, chosen], self.scale_F)

    def times(self, x: Fp8Rows, bias_F: Tensor | None, dtype: torch.dtype, ops: Ops) -> Tensor:
        """x · weightᵀ + bias in `dtype`."""
        return ops.fp8_linear(x.numbers, x.scale_T1, self.numbers_FD, self.scale_F, bias_F, dtype)


class Fp8Linear:
    """A linear layer for rows in float8; the layer it is made from has no matrix afterwards."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype, ops: Ops) -> None:
        self._matrix = Fp8Matrix.of(taken(linear.weight))
        self._bias_F = linear.bias.data
        self._dtype = dtype
        self._ops = ops

    def __call__(self, x: Fp8Rows) -> Tensor:
        return self._matrix.times(x, self._bias_F, self._dtype, self._ops)


@dataclass(frozen=True, slots=True)
class Fp8Experts:
    fc1_EFD: Tensor
    fc2_EDI: Tensor
    fc1_scale_EF: Tensor
    fc2_scale_ED: Tensor

    @classmethod
    def of(cls, experts: MoeMlp) -> Fp8Experts:
        fc1_EFD, fc1_scale_EF = _stack_to_fp8(taken(experts.fc1.weight))
        fc2_EDI, fc2_scale_ED = _stack_to_fp8(taken(experts.fc2.weight))
        return cls(fc1_EFD, fc2_EDI, fc1_scale_EF, fc2_scale_ED)


def taken(parameter: Tensor) -> Tensor:
    """The numbers of a parameter, which has none afterwards: once nobody holds them, their memory is free."""
    check_kept(parameter)
    weight = parameter.data
    parameter.data = weight.new_empty(0)
    return weight


def check_kept(parameter: Tensor) -> None:
    if parameter.numel() == 0:
        raise ConfigError(
            "quantization", "this model's weights were given up when it was quantised before; load the model again"
        )


def _stack_to_fp8(weight_EFD: Tensor) -> tuple[Tensor, Tensor]:
    """Expert by expert, so that little is held in fp32."""
    numbers_EFD = torch.empty_like(weight_EFD, dtype=torch.float8_e4m3fn)
    scale_EF = torch.empty(weight_EFD.shape[:2], dtype=torch.float32, device=weight_EFD.device)
    for expert, weight_FD in enumerate(weight_EFD):
        numbers_FD, scale_EF[expert] = weights_to_fp8(weight_FD)
        numbers_EFD[expert].copy_(numbers_FD)
    return numbers_EFD, scale_EF
