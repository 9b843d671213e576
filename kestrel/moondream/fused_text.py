"""The text model in few, wide operations: `TextModel` on a GPU.

A block's attention and MLP read the same norm and end in the same sum, so their matrices lie side by side: one product
makes [q | k | v | hidden], another takes [attention | hidden] back to the residual stream. With a handful of positions
both run as they are; with many, each half is a product of its own, whose epilogue does the activation.

The fused matrices take the place of the model's own, which become views of them: nothing is held twice.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from kestrel.kernels.moe_mlp import route_top_k
from kestrel.kernels.ops import Ops
from kestrel.models.contract import StepAttention
from kestrel.moondream.moe import MoeMlp
from kestrel.moondream.text import TauScaling, TextAttention, TextBlock, TextModel


class Norm:
    def __init__(self, norm: nn.LayerNorm, ops: Ops) -> None:
        self._parameters = (norm.weight.data, norm.bias.data, norm.eps)
        self._ops = ops

    def __call__(self, x_TD: Tensor) -> Tensor:
        return self._ops.layer_norm(x_TD, *self._parameters)

    def of_sum(self, x_TD: Tensor, a_TD: Tensor, b_TD: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(x + a + b, its norm)."""
        return self._ops.add_layer_norm(x_TD, a_TD, b_TD, *self._parameters)


class FusedAttention:
    """Everything between the projection to queries, keys and values and the one back."""

    def __init__(self, attention: TextAttention, layer: int, tables: tuple[Tensor, Tensor], ops: Ops) -> None:
        self._layer = layer
        self._counts = attention.head_counts[:2]
        self._head_dim = attention.head_dim
        self._tables = tables
        self._ops = ops
        self._tau = None if attention.tau is None else stacked_tau(attention.tau)

    def __call__(self, qkv_TF: Tensor, positions_T: Tensor, attend: StepAttention, out_TD: Tensor) -> None:
        """`out_TD` may lie where the values were: they are stored by then."""
        ops = self._ops
        tau = None if self._tau is None else ops.tau_factors(qkv_TF, *self._tau, positions_T)
        caches = attend.cache(self._layer)
        q_THD = ops.rotate_and_store(
            qkv_TF, *self._counts, *self._tables, positions_T, attend.slots_T, *caches, tau=tau
        )
        attend.attend_stored(self._layer, q_THD, out_TD.unflatten(1, (-1, self._head_dim)))


def stacked_tau(tau: TauScaling) -> tuple[Tensor, Tensor]:
    return torch.cat((tau.wq.data, tau.wv.data)), tau.alpha.data


class FusedDenseBlock:
    def __init__(self, block: TextBlock, tables: tuple[Tensor, Tensor], ops: Ops) -> None:
        attention, mlp = block.attn, block.mlp
        assert not isinstance(mlp, MoeMlp)
        self._ops = ops
        self._attend = FusedAttention(attention, block.layer, tables, ops)
        self._in_FD, self._in_bias_F = _rows_joined(attention.qkv, mlp.fc1)
        self._out_DF = _columns_joined(attention.proj, mlp.fc2)
        self._out_bias_D = attention.proj.bias.data + mlp.fc2.bias.data
        self._qkv_dim = attention.qkv.out_features
        self._mixed_dim = attention.proj.in_features

    def __call__(
        self, x_TD: Tensor, y_TD: Tensor, positions_T: Tensor, attend: StepAttention, next_norm: Norm
    ) -> tuple[Tensor, Tensor]:
        """(residual stream after the block, its norm for the next one)."""
        run = self._few if len(x_TD) <= self._ops.max_small_rows else self._many
        return run(x_TD, y_TD, positions_T, attend, next_norm)

    def _few(
        self, x_TD: Tensor, y_TD: Tensor, positions_T: Tensor, attend: StepAttention, next_norm: Norm
    ) -> tuple[Tensor, Tensor]:
        ops, qkv_dim = self._ops, self._qkv_dim
        wide_TF = ops.small_linear(y_TD, self._in_FD, self._in_bias_F, gelu_from=qkv_dim)
        # What attention leaves goes where the values were, beside the hidden numbers of the MLP.
        joined_TF = wide_TF[:, qkv_dim - self._mixed_dim :]
        self._attend(wide_TF[:, :qkv_dim], positions_T, attend, joined_TF[:, : self._mixed_dim])
        x_TD = ops.small_linear(joined_TF, self._out_DF, self._out_bias_D, residual_MF=x_TD)
        return x_TD, next_norm(x_TD)

    def _many(
        self, x_TD: Tensor, y_TD: Tensor, positions_T: Tensor, attend: StepAttention, next_norm: Norm
    ) -> tuple[Tensor, Tensor]:
        qkv_dim, mixed_dim = self._qkv_dim, self._mixed_dim
        qkv_TF = functional.linear(y_TD, self._in_FD[:qkv_dim], self._in_bias_F[:qkv_dim])
        mixed_TD = x_TD.new_empty(len(x_TD), mixed_dim)
        self._attend(qkv_TF, positions_T, attend, mixed_TD)
        a_TD = functional.linear(mixed_TD, self._out_DF[:, :mixed_dim], self._out_bias_D)
        hidden_TF = self._ops.gelu_linear(y_TD, self._in_FD[qkv_dim:], self._in_bias_F[qkv_dim:])
        return next_norm.of_sum(x_TD, a_TD, functional.linear(hidden_TF, self._out_DF[:, mixed_dim:]))


class FusedMoeBlock:
    def __init__(self, block: TextBlock, tables: tuple[Tensor, Tensor], ops: Ops) -> None:
        assert isinstance(block.mlp, MoeMlp)
        self._ops = ops
        self._attend = FusedAttention(block.attn, block.layer, tables, ops)
        self._qkv, self._proj = block.attn.qkv, block.attn.proj
        self._experts = block.mlp

    def __call__(
        self, x_TD: Tensor, y_TD: Tensor, positions_T: Tensor, attend: StepAttention, next_norm: Norm
    ) -> tuple[Tensor, Tensor]:
        """(residual stream after the block, its norm for the next one)."""
        qkv_TF = self._linear(y_TD, self._qkv)
        mixed_TD = x_TD.new_empty(len(x_TD), self._proj.in_features)
        self._attend(qkv_TF, positions_T, attend, mixed_TD)
        return next_norm.of_sum(x_TD, self._linear(mixed_TD, self._proj), self._expert_mlp(y_TD))

    def _expert_mlp(self, y_TD: Tensor) -> Tensor:
        experts = self._experts
        weights_TK, ids_TK = route_top_k(self._linear(y_TD, experts.router), experts.experts_per_token)
        return self._ops.moe_mlp(y_TD, weights_TK, ids_TK, experts.fc1.weight.data, experts.fc2.weight.data)

    def _linear(self, x_TD: Tensor, linear: nn.Linear) -> Tensor:
        apply = self._ops.small_linear if len(x_TD) <= self._ops.max_small_rows else functional.linear
        return apply(x_TD, linear.weight.data, linear.bias.data)


class FusedText:
    """`forward` and `logits` of a text model without adapters."""

    dense_block: type[FusedDenseBlock] = FusedDenseBlock

    def __init__(self, text: TextModel, ops: Ops) -> None:
        tables = (text.rope.cos, text.rope.sin)
        blocks = cast("list[TextBlock]", list(text.blocks))
        self._ops = ops
        self._norms = [Norm(block.ln, ops) for block in blocks]
        self._blocks = [
            (FusedMoeBlock if isinstance(block.mlp, MoeMlp) else self.dense_block)(block, tables, ops)
            for block in blocks
        ]
        self._post_norm = Norm(text.post_ln, ops)
        self._head = text.lm_head

    def forward(self, x_TD: Tensor, positions_T: Tensor, attend: StepAttention) -> Tensor:
        """The residual stream after the last block, not normalised."""
        y_TD = self._norms[0](x_TD)
        for block, next_norm in zip(self._blocks, [*self._norms[1:], self._post_norm], strict=True):
            x_TD, y_TD = block(x_TD, y_TD, positions_T, attend, next_norm)
        return x_TD

    def logits(self, hidden_TD: Tensor) -> Tensor:
        y_TD = self._post_norm(hidden_TD.contiguous())
        apply = self._ops.small_linear if len(y_TD) <= self._ops.max_small_rows else functional.linear
        return apply(y_TD, self._head.weight.data, self._head.bias.data)


def _rows_joined(first: nn.Linear, second: nn.Linear) -> tuple[Tensor, Tensor]:
    """One matrix and one bias for two layers of the same input."""
    weight_FD = torch.cat((first.weight.data, second.weight.data))
    bias_F = torch.cat((first.bias.data, second.bias.data))
    split = first.out_features
    first.weight.data, second.weight.data = weight_FD[:split], weight_FD[split:]
    first.bias.data, second.bias.data = bias_F[:split], bias_F[split:]
    return weight_FD, bias_F


def _columns_joined(first: nn.Linear, second: nn.Linear) -> Tensor:
    """One matrix for two layers whose outputs are added up."""
    weight_DF = torch.cat((first.weight.data, second.weight.data), dim=1)
    split = first.in_features
    first.weight.data, second.weight.data = weight_DF[:, :split], weight_DF[:, split:]
    return weight_DF
