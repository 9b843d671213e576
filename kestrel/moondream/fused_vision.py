"""The vision encoder in few, wide operations: `VisionModel.encode_crops` on a GPU.

Positions of all crops lie flat. The matrices that end attention and MLP add to the residual stream where it lies, but
without their biases: those are the same for all positions, and the norms add what has gathered up to them. The first
matrix of an MLP and its activation are one operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from kestrel.kernels.ops import Ops
from kestrel.kernels.patchify import ALIGNMENT
from kestrel.moondream.vision import VisionBlock, VisionModel


class PatchEmbedding:
    def __init__(self, vision: VisionModel) -> None:
        self._vision = vision
        missing = -vision.patch_emb.in_features % ALIGNMENT
        self._weight_DC = functional.pad(vision.patch_emb.weight.data, (0, missing))
        self.positions_PD = vision.pos_emb.data.flatten(0, -2).contiguous()
        """To be added, again and again, to what a call returns."""

    def __call__(self, patches_NPC: Tensor) -> Tensor:
        """[N · grid², enc_dim] of patches with zeros behind them, as `patchify` makes them, or without."""
        missing = self._weight_DC.shape[1] - patches_NPC.shape[2]
        padded_NPC = functional.pad(patches_NPC, (0, missing)) if missing else patches_NPC
        return functional.linear(padded_NPC, self._weight_DC, self._vision.patch_emb.bias).flatten(0, 1)

    def new_buffers(self, num_crops: int) -> tuple[Tensor, Tensor]:
        """Patches and features of so many crops."""
        patch_emb, num_patches = self._vision.patch_emb, self._vision.grid**2
        make = patch_emb.weight.data.new_zeros
        return (
            make(num_crops, num_patches, self._weight_DC.shape[1]),
            make(num_crops, num_patches, patch_emb.out_features),
        )


class FusedVision:
    def __init__(self, vision: VisionModel, ops: Ops) -> None:
        self._vision = vision
        self._ops = ops
        self._embed = PatchEmbedding(vision)
        self._blocks = cast("list[VisionBlock]", list(vision.blocks))
        self._missing_B2D = missing_biases(self._blocks)

    def encode_crops(self, patches_NPC: Tensor) -> Tensor:
        """[N, grid², ≥ 3·patch²] normalised pixels to [N, grid², enc_dim]."""
        num_crops, x_TD, first_norm = len(patches_NPC), self._embed(patches_NPC), self._blocks[0].ln1
        norms = [*(block.ln1 for block in self._blocks[1:]), self._vision.post_ln]
        x_TD, y_TD = self._ops.add_layer_norm(x_TD, self._embed.positions_PD, None, *norm_parameters(first_norm))
        for block, missing_2D, next_norm in zip(self._blocks, self._missing_B2D, norms, strict=True):
            y_TD = self._block(block, x_TD, y_TD, num_crops, missing_2D, next_norm)
        return y_TD.unflatten(0, (num_crops, -1))

    def new_buffers(self, num_crops: int) -> tuple[Tensor, Tensor]:
        """Patches and features of so many crops."""
        return self._embed.new_buffers(num_crops)

    def _block(
        self,
        block: VisionBlock,
        x_TD: Tensor,
        y_TD: Tensor,
        num_crops: int,
        missing_2D: Tensor,
        next_norm: nn.LayerNorm,
    ) -> Tensor:
        """The norm for the next block; x_TD becomes the residual stream after this one, less what is missing."""
        ops, attention, mlp = self._ops, block.attn, block.mlp
        qkv_NPC = attention.qkv(y_TD).unflatten(0, (num_crops, -1))
        mixed_TD = ops.attend_crops(qkv_NPC, attention.n_heads).flatten(0, 1)
        x_TD.addmm_(mixed_TD, attention.proj.weight.data.T)
        y_TD = ops.layer_norm(x_TD, *norm_parameters(block.ln2), missing_2D[0])
        x_TD.addmm_(ops.gelu_linear(y_TD, mlp.fc1.weight, mlp.fc1.bias), mlp.fc2.weight.data.T)
        return ops.layer_norm(x_TD, *norm_parameters(next_norm), missing_2D[1])


def missing_biases(blocks: Sequence[VisionBlock]) -> Tensor:
    """[blocks, 2, D] biases that the residual stream lacks after attention and after the MLP, in fp32 or finer."""
    biases_BD = torch.stack([linear.bias.data for block in blocks for linear in (block.attn.proj, block.mlp.fc2)])
    wide = torch.promote_types(biases_BD.dtype, torch.float32)
    return biases_BD.cumsum(0, dtype=wide).unflatten(0, (-1, 2))


def norm_parameters(norm: nn.LayerNorm) -> tuple[Tensor, Tensor, float]:
    return norm.weight, norm.bias, norm.eps
