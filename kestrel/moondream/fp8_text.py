"""The text model with matrices in float8: `FusedText` for half the weights to read.

A dense block keeps the layout of `FusedDenseBlock`, its two matrices quantised as they lie. With a handful of positions
their numbers are made wide as they stream by (activations stay as they are); with many, rows are quantised too, by the
operation that makes them, and the tensor cores multiply float8. Of experts the same holds from `MAX_EXACT_ROWS` on.

A block hands its sum on unadded: whether its norm is wanted in float8 is the next block's to say.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn

from kestrel.kernels.ops import Ops
from kestrel.models.contract import StepAttention
from kestrel.moondream.fp8_weights import Fp8Experts, Fp8Matrix, Fp8Rows, taken
from kestrel.moondream.fused_text import FusedAttention, FusedBlock, FusedMoeBlock, Head, Norm, fused_block
from kestrel.moondream.moe import MoeMlp
from kestrel.moondream.text import TextBlock, TextModel

MAX_EXACT_ROWS = 64
"""Up to so many positions experts take rows as they are: reading the matrices is what takes time then."""
Deltas: TypeAlias = tuple[Tensor, ...]
"""What is still to be added to the residual stream: nothing, or what attention and MLP left."""


class Fp8Norm:
    """As `Norm`, its rows in float8."""

    def __init__(self, norm: nn.LayerNorm, ops: Ops) -> None:
        self._parameters = (norm.weight.data, norm.bias.data, norm.eps)
        self._ops = ops

    def __call__(self, x_TD: Tensor) -> Fp8Rows:
        return Fp8Rows(*self._ops.layer_norm_to_fp8(x_TD, *self._parameters))

    def of_sum(self, x_TD: Tensor, a_TD: Tensor, b_TD: Tensor | None = None) -> tuple[Tensor, Fp8Rows]:
        """(x + a + b, its norm)."""
        x_TD, *rows = self._ops.add_layer_norm_to_fp8(x_TD, a_TD, b_TD, *self._parameters)
        return x_TD, Fp8Rows(*rows)


class Fp8Block(Protocol):
    def __call__(
        self, x_TD: Tensor, deltas: Deltas, positions_T: Tensor, attend: StepAttention
    ) -> tuple[Tensor, Deltas]:
        """The residual stream and what to add to it: first before the block, then after it."""
        ...


class Fp8DenseBlock:
    def __init__(self, block: TextBlock, tables: tuple[Tensor, Tensor], ops: Ops) -> None:
        attention, mlp = block.attn, block.mlp
        assert not isinstance(mlp, MoeMlp)
        self._ops = ops
        self._norm, self._norm_to_fp8 = Norm(block.ln, ops), Fp8Norm(block.ln, ops)
        self._attend = FusedAttention(attention, block.layer, tables, ops)
        self._qkv_dim, self._mixed_dim = attention.qkv.out_features, attention.proj.in_features
        self._in = Fp8Matrix.of(torch.cat((taken(attention.qkv.weight), taken(mlp.fc1.weight))))
        self._in_bias_F = torch.cat((attention.qkv.bias.data, mlp.fc1.bias.data))
        self._out = Fp8Matrix.of(torch.cat((taken(attention.proj.weight), taken(mlp.fc2.weight)), dim=1))
        self._out_bias_D = attention.proj.bias.data + mlp.fc2.bias.data

    def __call__(
        self, x_TD: Tensor, deltas: Deltas, positions_T: Tensor, attend: StepAttention
    ) -> tuple[Tensor, Deltas]:
        run = self._few if len(x_TD) <= self._ops.max_small_rows else self._many
        return run(x_TD, deltas, positions_T, attend)

    def _few(self, x_TD: Tensor, deltas: Deltas, positions_T: Tensor, attend: StepAttention) -> tuple[Tensor, Deltas]:
        ops, qkv_dim = self._ops, self._qkv_dim
        x_TD, y_TD = self._norm.of_sum(x_TD, *deltas) if deltas else (x_TD, self._norm(x_TD))
        wide_TF = ops.small_linear(
            y_TD, self._in.numbers_FD, self._in_bias_F, gelu_from=qkv_dim, scale_F=self._in.scale_F
        )
        # What attention leaves goes where the values were, beside the hidden numbers of the MLP.
        joined_TF = wide_TF[:, qkv_dim - self._mixed_dim :]
        self._attend(wide_TF[:, :qkv_dim], positions_T, attend, joined_TF[:, : self._mixed_dim])
        x_TD = ops.small_linear(
            joined_TF, self._out.numbers_FD, self._out_bias_D, residual_MF=x_TD, scale_F=self._out.scale_F
        )
        return x_TD, ()

    def _many(self, x_TD: Tensor, deltas: Deltas, positions_T: Tensor, attend: StepAttention) -> tuple[Tensor, Deltas]:
        ops, dtype, qkv_dim, mixed_dim = self._ops, x_TD.dtype, self._qkv_dim, self._mixed_dim
        x_TD, y = self._norm_to_fp8.of_sum(x_TD, *deltas) if deltas else (x_TD, self._norm_to_fp8(x_TD))
        qkv_TF = self._in.rows(slice(qkv_dim)).times(y, self._in_bias_F[:qkv_dim], dtype, ops)
        mixed_TD = x_TD.new_empty(len(x_TD), mixed_dim)
        self._attend(qkv_TF, positions_T, attend, mixed_TD)
        mixed = Fp8Rows(*ops.rows_to_fp8(mixed_TD))
        a_TD = self._out.columns(slice(mixed_dim)).times(mixed, self._out_bias_D, dtype, ops)
        hidden_TF = self._in.rows(slice(qkv_dim, None)).times(y, self._in_bias_F[qkv_dim:], dtype, ops)
        hidden = Fp8Rows(*ops.gelu_to_fp8(hidden_TF))
        return x_TD, (a_TD, self._out.columns(slice(mixed_dim, None)).times(hidden, None, dtype, ops))


class Fp8ExpertsBlock(FusedMoeBlock):
    """`FusedMoeBlock` with the experts alone in float8."""

    def __init__(self, block: TextBlock, tables: tuple[Tensor, Tensor], ops: Ops) -> None:
        super().__init__(block, tables, ops)
        assert isinstance(block.mlp, MoeMlp)
        self._fp8_experts = Fp8Experts.of(block.mlp)

    def _run_experts(self, y_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        e, ops = self._fp8_experts, self._ops
        run = ops.moe_mlp if len(y_TD) <= MAX_EXACT_ROWS else ops.moe_mlp_fp8
        return run(y_TD, weights_TK, ids_TK, e.fc1_EFD, e.fc2_EDI, e.fc1_scale_EF, e.fc2_scale_ED)


def fp8_experts_block(block: TextBlock, tables: tuple[Tensor, Tensor], ops: Ops) -> FusedBlock:
    """Blocks for a `FusedText` whose experts alone are in float8."""
    make = Fp8ExpertsBlock if isinstance(block.mlp, MoeMlp) else fused_block
    return make(block, tables, ops)


class Fp8MoeBlock:
    """A block of experts among dense blocks in float8."""

    def __init__(self, block: TextBlock, tables: tuple[Tensor, Tensor], ops: Ops) -> None:
        self._norm = Norm(block.ln, ops)
        self._block = Fp8ExpertsBlock(block, tables, ops)

    def __call__(
        self, x_TD: Tensor, deltas: Deltas, positions_T: Tensor, attend: StepAttention
    ) -> tuple[Tensor, Deltas]:
        x_TD, y_TD = self._norm.of_sum(x_TD, *deltas) if deltas else (x_TD, self._norm(x_TD))
        return x_TD, self._block.deltas(y_TD, positions_T, attend)


class Fp8Text:
    """`forward` and `logits` of a text model without adapters. The model has no matrices in its blocks afterwards."""

    def __init__(self, text: TextModel, ops: Ops) -> None:
        tables = (text.rope.cos, text.rope.sin)
        self._blocks: list[Fp8Block] = [
            (Fp8MoeBlock if isinstance(block.mlp, MoeMlp) else Fp8DenseBlock)(block, tables, ops)
            for block in cast("list[TextBlock]", list(text.blocks))
        ]
        self._post_norm = Norm(text.post_ln, ops)
        self._head = Head(text, ops)

    def forward(self, x_TD: Tensor, positions_T: Tensor, attend: StepAttention) -> Tensor:
        """The residual stream after the last block, not normalised."""
        deltas: Deltas = ()
        for block in self._blocks:
            x_TD, deltas = block(x_TD, deltas, positions_T, attend)
        return self._post_norm.of_sum(x_TD, *deltas)[0] if deltas else x_TD

    def logits(self, hidden_TD: Tensor) -> Tensor:
        return self._head(hidden_TD)
