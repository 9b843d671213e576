"""The fused text model with adapters, as device work alone: each end of a dense block gets its deltas in one operation.

The activation of an adapted position must wait for its delta. With a handful of positions those of the base model have
theirs inside the product, as without adapters, so that they get the same numbers to the bit; with many, the operation
that adds the deltas activates all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from kestrel.kernels.low_rank import SlotTiles
from kestrel.kernels.ops import Ops
from kestrel.models.contract import LayerFactors, SlotDeltas, StepAttention
from kestrel.moondream.fused_text import FusedDenseBlock, FusedText, Norm
from kestrel.moondream.text import TextModel


@dataclass(frozen=True, slots=True)
class BlockDeltas:
    """What one block needs of a step's adapters."""

    factors: LayerFactors
    reads_norm_S: Tensor
    tiles: SlotTiles
    is_base_T: Tensor


class AdaptedDenseBlock(FusedDenseBlock):
    def adapted(
        self,
        x_TD: Tensor,
        y_TD: Tensor,
        positions_T: Tensor,
        attend: StepAttention,
        next_norm: Norm,
        deltas: BlockDeltas,
    ) -> tuple[Tensor, Tensor]:
        """(residual stream after the block, its norm for the next one)."""
        run = self._few_adapted if len(x_TD) <= self._ops.max_small_rows else self._many_adapted
        return run(x_TD, y_TD, positions_T, attend, next_norm, deltas)

    def _few_adapted(
        self,
        x_TD: Tensor,
        y_TD: Tensor,
        positions_T: Tensor,
        attend: StepAttention,
        next_norm: Norm,
        deltas: BlockDeltas,
    ) -> tuple[Tensor, Tensor]:
        ops, qkv_dim, mixed_dim = self._ops, self._qkv_dim, self._mixed_dim
        wide_TF = ops.small_linear(y_TD, self._in_FD, self._in_bias_F, gelu_from=qkv_dim, gelu_rows_M=deltas.is_base_T)
        self._add_input_deltas(deltas, y_TD, wide_TF[:, :qkv_dim], wide_TF[:, qkv_dim:], activates_base=False)
        # What attention leaves goes where the values were, beside the hidden numbers of the MLP.
        joined_TF = wide_TF[:, qkv_dim - mixed_dim :]
        self._attend(wide_TF[:, :qkv_dim], positions_T, attend, joined_TF[:, :mixed_dim])
        x_TD = ops.small_linear(joined_TF, self._out_DF, self._out_bias_D, residual_MF=x_TD)
        self._add_output_deltas(deltas, x_TD, joined_TF[:, :mixed_dim], y_TD, joined_TF[:, mixed_dim:])
        return x_TD, next_norm(x_TD)

    def _many_adapted(
        self,
        x_TD: Tensor,
        y_TD: Tensor,
        positions_T: Tensor,
        attend: StepAttention,
        next_norm: Norm,
        deltas: BlockDeltas,
    ) -> tuple[Tensor, Tensor]:
        qkv_dim, mixed_dim = self._qkv_dim, self._mixed_dim
        qkv_TF = functional.linear(y_TD, self._in_FD[:qkv_dim], self._in_bias_F[:qkv_dim])
        hidden_TF = functional.linear(y_TD, self._in_FD[qkv_dim:], self._in_bias_F[qkv_dim:])
        self._add_input_deltas(deltas, y_TD, qkv_TF, hidden_TF, activates_base=True)
        mixed_TD = x_TD.new_empty(len(x_TD), mixed_dim)
        self._attend(qkv_TF, positions_T, attend, mixed_TD)
        a_TD = functional.linear(mixed_TD, self._out_DF[:, :mixed_dim], self._out_bias_D)
        self._add_output_deltas(deltas, a_TD, mixed_TD, y_TD, hidden_TF)
        return next_norm.of_sum(x_TD, a_TD, functional.linear(hidden_TF, self._out_DF[:, mixed_dim:]))

    def _add_input_deltas(
        self, deltas: BlockDeltas, y_TD: Tensor, qkv_TF: Tensor, hidden_TF: Tensor, *, activates_base: bool
    ) -> None:
        factors = deltas.factors
        self._ops.add_input_deltas(
            deltas.tiles, y_TD, qkv_TF, factors.qkv, hidden_TF, factors.fc1, activates_base=activates_base
        )

    def _add_output_deltas(
        self, deltas: BlockDeltas, total_TD: Tensor, mixed_TD: Tensor, y_TD: Tensor, hidden_TF: Tensor
    ) -> None:
        factors = deltas.factors
        self._ops.add_output_deltas(
            deltas.tiles, total_TD, mixed_TD, y_TD, deltas.reads_norm_S, factors.proj, hidden_TF, factors.fc2
        )


class AdaptedText(FusedText):
    """A text model of dense blocks; without adapters it runs as `FusedText`."""

    def __init__(self, text: TextModel, ops: Ops) -> None:
        super().__init__(text, ops, AdaptedDenseBlock)
        self._ops = ops

    def forward_adapted(self, x_TD: Tensor, positions_T: Tensor, attend: StepAttention, deltas: SlotDeltas) -> Tensor:
        """The residual stream after the last block, not normalised."""
        tiles, is_base_T = self._ops.tile_slots(deltas.slot_T, deltas.num_slots), deltas.slot_T < 0
        next_norms = [*self._norms[1:], self._post_norm]
        y_TD = self._norms[0](x_TD)
        for block, next_norm, factors in zip(self._blocks, next_norms, deltas.layers, strict=True):
            assert isinstance(block, AdaptedDenseBlock)
            own = BlockDeltas(factors, deltas.reads_norm_S, tiles, is_base_T)
            x_TD, y_TD = block.adapted(x_TD, y_TD, positions_T, attend, next_norm, own)
        return x_TD
