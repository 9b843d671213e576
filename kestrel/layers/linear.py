"""Matrices that know the number format of their weights: a linear layer, and the experts of a mixture.

A weight is plain, in the model's dtype, or float8 (e4m3) with one scale per output. For a single row a float8 weight
is widened as it streams by and the row stays as it is; more rows are quantised too, and tensor cores multiply float8.
(Where tensor cores are slow with a handful of rows, those are treated like a single one.) Whoever makes the rows, a
norm or an activation, can quantise them on the way (`Fp8Rows`); rows that come as they are get quantised here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from kestrel.kernels.fp8 import weights_to_fp8
from kestrel.kernels.ops import PLAIN, Ops
from kestrel.parallel.ranks import Part, Range, Ranks

ROWS, COLUMNS = -2, -1
"""Dimensions of a matrix: its outputs, and its inputs."""
NO_PARTS: Mapping[str, Part] = MappingProxyType({})


def normal_parameter(*shape: int, std: float = 1.0) -> nn.Parameter:
    """Numbers of a bell curve; none on the meta device, where filling in pulls in torch's compiler: half a second."""
    parameter = nn.Parameter(torch.empty(*shape))
    if not parameter.is_meta:
        nn.init.normal_(parameter, std=std)
    return parameter


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Rows in float8 and their scales [T, 1]."""

    numbers: Tensor
    scale_T1: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    def __getitem__(self, wanted_N: Tensor) -> Fp8Rows:
        return Fp8Rows(self.numbers[wanted_N], self.scale_T1[wanted_N])


Rows: TypeAlias = Tensor | Fp8Rows


def keep_part(module: nn.Module, name: str, part: Part) -> None:
    """From now on a parameter is this part of what it was; `parts` of its module remembers it."""
    parameter = getattr(module, name)
    setattr(module, name, nn.Parameter(part.cut(parameter.data), requires_grad=parameter.requires_grad))
    setattr(module, "parts", {**getattr(module, "parts", NO_PARTS), name: part})  # noqa: B010 - as in `use_ops`


def parts_of(model: nn.Module) -> dict[str, Part]:
    """The parameters of which a model has a part alone."""
    modules = ((name, getattr(module, "parts", NO_PARTS)) for name, module in model.named_modules())
    return {f"{name}.{leaf}".removeprefix("."): part for name, parts in modules for leaf, part in parts.items()}


class Linear(nn.Linear):
    """x · weightᵀ + bias, with what often follows it."""

    ops: Ops = PLAIN
    parts: Mapping[str, Part] = NO_PARTS
    scale_F: Tensor | None = None
    """One per output of a float8 weight."""
    bias_in_norms = False
    """`add_and_norm` leaves the bias out, because the norms that follow add it (`LayerNorm.shift_D`)."""
    is_beside = False
    """With a handful of rows, other kernels run at the same time."""

    def reset_parameters(self) -> None:
        """Not on the meta device, where there is nothing to fill in: half of the time to build a model there."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def split_outputs(self, *ranges: Range) -> None:
        """Keeps these outputs."""
        keep_part(self, "weight", Part(ROWS, ranges, self.out_features))
        if self.bias is not None:
            keep_part(self, "bias", Part(COLUMNS, ranges, self.out_features))
        self.out_features = self.weight.shape[0]

    def split_inputs(self, ranks: Ranks, *ranges: Range) -> None:
        """Takes these inputs: what it gives is to be added up over the ranks, of which the first adds the bias."""
        keep_part(self, "weight", Part(COLUMNS, ranges, self.in_features))
        if self.bias is not None:
            whole = (0, self.out_features)
            keep_part(self, "bias", Part(COLUMNS, (whole,), self.out_features, is_elsewhere=ranks.rank > 0))
        self.in_features = self.weight.shape[1]

    @property
    def is_fp8(self) -> bool:
        return self.scale_F is not None

    def takes_fp8_rows(self, x: Rows) -> bool:
        """Whether these are multiplied in float8."""
        return self.is_fp8 and not self.is_small(x)

    def is_small(self, x: Rows) -> bool:
        """Whether these are a handful of rows, which stay as they are."""
        most = 1 if self.is_fp8 and self.ops.max_small_fp8_rows else self.ops.max_small_rows
        return len(x.shape) == 2 and x.shape[0] <= most

    def forward(self, x: Rows, /) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if isinstance(x, Fp8Rows):
            return self.ops.fp8_linear(x.numbers, x.scale_T1, self.weight, self.scale_F, self.bias, self._out_dtype)
        if self.is_small(x):
            return self.ops.small_linear(x, self.weight, self.bias, scale_F=self.scale_F, is_beside=self.is_beside)
        if self.is_fp8:
            return self(self.quantised(x))
        return self.ops.linear(x, self.weight, self.bias)

    def of_norm(self, x_TD: Tensor, norm: tuple[Tensor, float]) -> Tensor:
        """Of a handful of rows that go through an RMS norm first, in one operation."""
        return self.ops.small_linear(x_TD, self.weight, self.bias, scale_F=self.scale_F, norm=norm)

    def gelu(self, x: Rows) -> Tensor:
        """GELU_tanh of this layer, in as few operations as the format allows."""
        if isinstance(x, Fp8Rows) or self.takes_fp8_rows(x):
            return functional.gelu(self(x), approximate="tanh")
        if self.is_small(x):
            return self.ops.small_linear(x, self.weight, self.bias, has_gelu=True, scale_F=self.scale_F)
        return self.ops.gelu_linear(x, self.weight, self.bias)

    def add_to(self, sum_TF: Tensor, x: Rows) -> Tensor:
        """sum += x · weightᵀ, in place and without a bias."""
        rows = self.rows(x) if isinstance(x, Tensor) else x
        if isinstance(rows, Fp8Rows):
            return self.ops.add_fp8_linear(sum_TF, rows.numbers, rows.scale_T1, self.weight, self.scale_F)
        if self.is_fp8:
            return sum_TF.add_(self.ops.small_linear(rows, self.weight, scale_F=self.scale_F))
        return self.ops.add_linear(sum_TF, rows, self.weight)

    def rows(self, x: Tensor) -> Rows:
        """The rows as this layer multiplies them: several layers of the same format can share the result."""
        return self.quantised(x) if self.takes_fp8_rows(x) else x

    def quantised(self, x: Tensor) -> Fp8Rows:
        return Fp8Rows(*self.ops.rows_to_fp8(x))

    def to_fp8(self) -> None:
        """The weight becomes float8; what it was made from is given up."""
        self._out_dtype = self.weight.dtype
        numbers_FD, self.scale_F = weights_to_fp8(self.weight.data)
        self.weight.requires_grad_(False)
        self.weight.data = numbers_FD

    _out_dtype: torch.dtype = torch.bfloat16
    """Of what a float8 weight gives."""


class ExpertMatrices(nn.Module):
    """One bias-free matrix per expert: `weight` [num_experts, out_dim, in_dim], plain or float8."""

    parts: Mapping[str, Part] = NO_PARTS

    def __init__(self, num_experts: int, out_dim: int, in_dim: int) -> None:
        super().__init__()
        self.weight = normal_parameter(num_experts, out_dim, in_dim, std=in_dim**-0.5)
        self.scale_EF: Tensor | None = None

    def matrix(self, expert: int, dtype: torch.dtype) -> Tensor:
        """One expert's, widened."""
        if self.scale_EF is None:
            return self.weight[expert]
        return (self.weight[expert].float() * self.scale_EF[expert][:, None]).to(dtype)

    def split(self, dim: int, *ranges: Range) -> None:
        """Keeps these outputs or inputs of every expert."""
        keep_part(self, "weight", Part(dim, ranges, self.weight.shape[dim]))

    def to_fp8(self) -> None:
        """Expert by expert, so that little is held in fp32."""
        weight_EFD = self.weight.data
        numbers_EFD = torch.empty_like(weight_EFD, dtype=torch.float8_e4m3fn)
        scale_EF = torch.empty(weight_EFD.shape[:2], dtype=torch.float32, device=weight_EFD.device)
        for expert, weight_FD in enumerate(weight_EFD):
            numbers_FD, scale_EF[expert] = weights_to_fp8(weight_FD)
            numbers_EFD[expert].copy_(numbers_FD)
        self.weight.requires_grad_(False)
        self.weight.data, self.scale_EF = numbers_EFD, scale_EF


def use_ops(model: nn.Module, ops: Ops) -> None:
    """From now on all layers of a model run with these operations."""
    for module in model.modules():
        if hasattr(type(module), "ops"):
            setattr(module, "ops", ops)  # noqa: B010 - as torch types modules, an attribute is a tensor or a module
