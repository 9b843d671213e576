"""A plain model that computes with the numbers float8 would hold: what the float8 paths must give.

Weights are rounded once, in place; the rows that go into a matrix are rounded where there are many of them.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from kestrel.kernels.moe_mlp import gate_hidden, mix_experts, route_top_k
from kestrel.layers.decoder import ParallelBlock
from kestrel.layers.linear import Linear, Rows
from kestrel.layers.mlp import Moe
from kestrel.moondream.model import MoondreamModel
from kestrel.moondream.vision import VisionBlock

FEW_ROWS, FEW_ROWS_OF_EXPERTS = 16, 64
"""The plain operations call so many rows few; then text rows are not rounded."""


def rounded(x: Tensor, dim: int = -1) -> Tensor:
    """Each row as multiples of its largest number over 448, rounded to float8 and back."""
    scale = x.abs().amax(dim=dim, keepdim=True) / 448.0
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def fake_fp8(model: MoondreamModel) -> MoondreamModel:
    """As `quantization="fp8"`."""
    fake = fake_fp8_experts(model)
    for vision_block in cast("list[VisionBlock]", list(fake.vision.blocks)):
        for linear in (vision_block.attn.qkv, vision_block.attn.proj, vision_block.mlp.fc1, vision_block.mlp.fc2):
            linear.weight.data = rounded(linear.weight.data)
            linear.__class__ = _RoundsRows
    for block in cast("list[ParallelBlock]", list(fake.text.blocks)):
        if isinstance(block.mlp, Moe):
            continue
        for linear in (block.attn.qkv, block.attn.proj, block.mlp.fc1, block.mlp.fc2):
            linear.weight.data = rounded(linear.weight.data)
            linear.__class__ = RoundsManyRows
    return fake


def fake_fp8_weights(model: MoondreamModel) -> MoondreamModel:
    """As `quantization="fp8"` in the text model, for a handful of rows, which are not rounded."""
    fake = fake_fp8(model)
    for block in cast("list[ParallelBlock]", list(fake.text.blocks)):
        if isinstance(block.mlp, Moe):
            del block.mlp.forward
        else:
            for linear in (block.attn.qkv, block.attn.proj, block.mlp.fc1, block.mlp.fc2):
                linear.__class__ = Linear
    return fake


def fake_fp8_experts(model: MoondreamModel) -> MoondreamModel:
    """As `quantization="fp8-experts"`."""
    fake = copy.deepcopy(model)
    for block in cast("list[ParallelBlock]", list(fake.text.blocks)):
        if isinstance(block.mlp, Moe):
            for matrices in (block.mlp.fc1, block.mlp.fc2):
                matrices.weight.data = rounded(matrices.weight.data)
            block.mlp.forward = partial(_with_rounded_rows, block.mlp)
    return fake


def _with_rounded_rows(experts: Moe, x_TD: Tensor) -> Tensor:
    """The mixture with rows rounded before both matrices, where there are many of them."""
    keep = (lambda x: x) if len(x_TD) <= FEW_ROWS_OF_EXPERTS else rounded
    weights_TK, ids_TK = route_top_k(experts.router(x_TD), experts.experts_per_token)

    def run_expert(expert: int, _: Tensor, x_ND: Tensor) -> Tensor:
        hidden_NI = gate_hidden(functional.linear(keep(x_ND), experts.fc1.weight[expert]))
        return functional.linear(keep(hidden_NI), experts.fc2.weight[expert])

    return mix_experts(x_TD, weights_TK, ids_TK, experts.fc1.weight.shape[0], run_expert)


class _RoundsRows(Linear):
    """Rounds the rows that go into it, where there are more than so many of them."""

    most_exact_rows = 0

    def forward(self, x: Rows) -> Tensor:
        assert isinstance(x, Tensor)
        return super().forward(rounded(x) if len(x) > self.most_exact_rows else x)

    def is_small(self, x: Rows) -> bool:
        """Rows that are rounded go through `forward`."""
        return super().is_small(x) and x.shape[0] <= self.most_exact_rows

    def gelu(self, x: Rows) -> Tensor:
        return functional.gelu(self(x), approximate="tanh")


class RoundsManyRows(_RoundsRows):
    most_exact_rows = FEW_ROWS
