"""The vision encoder with matrices in float8: `FusedVision` on tensor cores that multiply float8.

What makes the rows of a product, a norm or an activation, quantises them as well. The patch embedding and everything
after the last block stay as they are.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from kestrel.kernels.ops import Ops
from kestrel.moondream.fp8_weights import Fp8Linear, Fp8Rows
from kestrel.moondream.fused_vision import PatchEmbedding, norm_parameters
from kestrel.moondream.vision import VisionBlock, VisionModel


class Fp8VisionBlock:
    def __init__(self, block: VisionBlock, dtype: torch.dtype, ops: Ops) -> None:
        self._ops = ops
        self._num_heads = block.attn.n_heads
        self._middle_norm = block.ln2
        self._qkv, self._proj = Fp8Linear(block.attn.qkv, dtype, ops), Fp8Linear(block.attn.proj, dtype, ops)
        self._fc1, self._fc2 = Fp8Linear(block.mlp.fc1, dtype, ops), Fp8Linear(block.mlp.fc2, dtype, ops)

    def __call__(self, x_TD: Tensor, y: Fp8Rows, num_crops: int) -> tuple[Tensor, Tensor]:
        """(residual stream after attention, what the MLP adds to it)."""
        ops = self._ops
        qkv_NPC = self._qkv(y).unflatten(0, (num_crops, -1))
        mixed_TD = ops.attend_crops(qkv_NPC, self._num_heads).flatten(0, 1)
        a_TD = self._proj(Fp8Rows(*ops.rows_to_fp8(mixed_TD)))
        x_TD, *rows = ops.add_layer_norm_to_fp8(x_TD, a_TD, None, *norm_parameters(self._middle_norm))
        hidden = Fp8Rows(*ops.gelu_to_fp8(self._fc1(Fp8Rows(*rows))))
        return x_TD, self._fc2(hidden)


class Fp8Vision:
    """`VisionModel.encode_crops`. The model has no matrices in its blocks afterwards."""

    def __init__(self, vision: VisionModel, ops: Ops) -> None:
        blocks = cast("list[VisionBlock]", list(vision.blocks))
        dtype = vision.patch_emb.weight.dtype
        self._ops = ops
        self._embed = PatchEmbedding(vision)
        self._norms: list[nn.LayerNorm] = [block.ln1 for block in blocks]
        self._post_norm = vision.post_ln
        self._blocks = [Fp8VisionBlock(block, dtype, ops) for block in blocks]

    def encode_crops(self, patches_NPC: Tensor) -> Tensor:
        """[N, grid², 3·patch²] normalised pixels to [N, grid², enc_dim]."""
        ops, num_crops = self._ops, len(patches_NPC)
        x_TD, delta_TD = self._embed(patches_NPC), self._embed.positions_PD
        for block, norm in zip(self._blocks, self._norms, strict=True):
            x_TD, *rows = ops.add_layer_norm_to_fp8(x_TD, delta_TD, None, *norm_parameters(norm))
            x_TD, delta_TD = block(x_TD, Fp8Rows(*rows), num_crops)
        y_TD = ops.add_layer_norm(x_TD, delta_TD, None, *norm_parameters(self._post_norm))[1]
        return y_TD.unflatten(0, (num_crops, -1))

    def new_buffers(self, num_crops: int) -> tuple[Tensor, Tensor]:
        """Patches and features of so many crops."""
        return self._embed.new_buffers(num_crops)
