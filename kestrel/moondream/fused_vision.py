"""The vision encoder in few, wide operations: `VisionModel.encode_crops` on a GPU.

Positions of all crops lie flat. A sum and the norm that follows it are one operation, and so are the first matrix of an
MLP and its activation.
"""

from __future__ import annotations

from typing import cast

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

    def __call__(self, patches_NPC: Tensor) -> Tensor:
        """[N · grid², enc_dim] of patches with zeros behind them, as `patchify` makes them, or without."""
        missing = self._weight_DC.shape[1] - patches_NPC.shape[2]
        padded_NPC = functional.pad(patches_NPC, (0, missing)) if missing else patches_NPC
        x_NPD = functional.linear(padded_NPC, self._weight_DC, self._vision.patch_emb.bias) + self._vision.pos_emb
        return x_NPD.flatten(0, 1)

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

    def encode_crops(self, patches_NPC: Tensor) -> Tensor:
        """[N, grid², ≥ 3·patch²] normalised pixels to [N, grid², enc_dim]."""
        vision, num_crops = self._vision, len(patches_NPC)
        x_TD = self._embed(patches_NPC)
        blocks = cast("list[VisionBlock]", list(vision.blocks))
        y_TD = self._ops.layer_norm(x_TD, *norm_parameters(blocks[0].ln1))
        for block, next_norm in zip(blocks, [*(block.ln1 for block in blocks[1:]), vision.post_ln], strict=True):
            x_TD, y_TD = self._block(block, x_TD, y_TD, num_crops, next_norm)
        return y_TD.unflatten(0, (num_crops, -1))

    def new_buffers(self, num_crops: int) -> tuple[Tensor, Tensor]:
        """Patches and features of so many crops."""
        return self._embed.new_buffers(num_crops)

    def _block(
        self, block: VisionBlock, x_TD: Tensor, y_TD: Tensor, num_crops: int, next_norm: nn.LayerNorm
    ) -> tuple[Tensor, Tensor]:
        """(residual stream after the block, its norm for the next one)."""
        ops, attention, mlp = self._ops, block.attn, block.mlp
        qkv_NPC = attention.qkv(y_TD).unflatten(0, (num_crops, -1))
        mixed_TD = attention.proj(ops.attend_crops(qkv_NPC, attention.n_heads).flatten(0, 1))
        x_TD, y_TD = ops.add_layer_norm(x_TD, mixed_TD, None, *norm_parameters(block.ln2))
        hidden_TF = ops.gelu_linear(y_TD, mlp.fc1.weight, mlp.fc1.bias)
        return ops.add_layer_norm(x_TD, mlp.fc2(hidden_TF), None, *norm_parameters(next_norm))


def norm_parameters(norm: nn.LayerNorm) -> tuple[Tensor, Tensor, float]:
    return norm.weight, norm.bias, norm.eps
