"""The vision tower: crops to features, features of all tiles to one embedding per grid cell.

A crop is a grid × grid field of patches. Crop 0 shows the whole picture; the others are overlapping tiles of it, which
are encoded alone, stitched without their margins, averaged back to the grid and projected together with crop 0.

Positions of all crops lie flat. On a GPU the matrices that end attention and MLP add to the residual stream where it
lies, but without their biases: those are the same for all positions, and the norms add what has gathered up to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from kestrel.kernels.ops import PLAIN, Ops
from kestrel.kernels.vision import ALIGNMENT
from kestrel.layers.linear import Linear, Rows, use_ops
from kestrel.layers.mlp import Mlp
from kestrel.layers.norm import LayerNorm, add_and_norm
from kestrel.moondream.config import VisionConfig


@dataclass(frozen=True)
class VisionFeatures:
    """Features of N crops, each [N, grid², enc_dim]."""

    final: Tensor
    early: Tensor
    """The residual stream after an inner block."""


class VisionAttention(nn.Module):
    """Every patch of a crop attends to every other."""

    ops: Ops = PLAIN

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.n_heads = config.enc_n_heads
        self.qkv = Linear(config.enc_dim, 3 * config.enc_dim)
        self.proj = Linear(config.enc_dim, config.enc_dim)

    def mix(self, y: Rows, num_crops: int) -> Tensor:
        qkv_NPC = self.qkv(y).unflatten(0, (num_crops, -1))
        return self.ops.attend_crops(qkv_NPC, self.n_heads).flatten(0, 1)


class VisionBlock(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.ln1 = LayerNorm(config.enc_dim)
        self.attn = VisionAttention(config)
        self.ln2 = LayerNorm(config.enc_dim)
        self.mlp = Mlp(config.enc_dim, config.enc_ff_dim, config.enc_dim)

    def forward(
        self, x_TD: Tensor, y: Rows, num_crops: int, next_norm: LayerNorm, *, to_fp8: bool
    ) -> tuple[Tensor, Rows]:
        """(residual stream after the block, its norm for the next one); `y` is the norm for this one."""
        mixed_TD = self.attn.mix(y, num_crops)
        x_TD, y = add_and_norm(x_TD, self.attn.proj, mixed_TD, self.ln2, to_fp8=self.mlp.fc1.takes_fp8_rows(x_TD))
        return add_and_norm(x_TD, self.mlp.fc2, self.mlp.hidden(y), next_norm, to_fp8=to_fp8)


class VisionModel(nn.Module):
    """Encoder and projector; parameters carry the names of the published checkpoints."""

    ops: Ops = PLAIN

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.grid = config.grid
        self.overlap_margin = config.overlap_margin
        self.patch_emb = Linear(config.patch_dim, config.enc_dim)
        self.pos_emb = nn.Parameter(torch.zeros(1, config.num_patches, config.enc_dim))
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.enc_n_layers))
        self.post_ln = LayerNorm(config.enc_dim)
        self.proj_mlp = Mlp(2 * config.enc_dim, config.proj_inner_dim, config.proj_out_dim)

    def fuse(self, ops: Ops) -> None:
        """From now on run in few, wide operations of this bundle. The projector stays as it is."""
        self.ops = ops
        for part in (self.patch_emb, self.blocks, self.post_ln):
            use_ops(part, ops)
        missing = -self.patch_emb.weight.shape[1] % ALIGNMENT
        self.patch_emb.weight.data = functional.pad(self.patch_emb.weight.data, (0, missing))
        enders = [linear for block in self._blocks() for linear in (block.attn.proj, block.mlp.fc2)]
        norms = [norm for block in self._blocks() for norm in (block.ln1, block.ln2)]
        biases_BD = torch.stack([linear.bias.data for linear in enders])
        wide = torch.promote_types(biases_BD.dtype, torch.float32)
        for linear, norm, missing_D in zip(
            enders, [*norms[1:], self.post_ln], biases_BD.cumsum(0, dtype=wide), strict=True
        ):
            linear.bias_in_norms, norm.shift_D = True, missing_D

    def to_fp8(self) -> None:
        """From now on the matrices of the blocks are float8. The patch embedding and the projector stay as they are."""
        for block in self._blocks():
            for linear in (block.attn.qkv, block.attn.proj, block.mlp.fc1, block.mlp.fc2):
                linear.to_fp8()

    def new_buffers(self, num_crops: int) -> tuple[Tensor, Tensor]:
        """Patches and features of so many crops."""
        weight_DC, num_patches = self.patch_emb.weight.data, self.grid**2
        dim, columns = weight_DC.shape
        return weight_DC.new_zeros(num_crops, num_patches, columns), weight_DC.new_zeros(num_crops, num_patches, dim)

    def encode_crops(self, patches_NPC: Tensor) -> Tensor:
        """[N, grid², ≥ 3·patch²] normalised pixels (channel, row, column) to [N, grid², enc_dim]."""
        return self._encode(patches_NPC)[0]

    def encode_crops_with_early(self, patches_NPC: Tensor, early_block: int) -> VisionFeatures:
        """As `encode_crops`, and the stream right after block index `early_block`."""
        assert 0 <= early_block < len(self.blocks)
        return VisionFeatures(*self._encode(patches_NPC, early_block))

    def _encode(self, patches_NPC: Tensor, early_block: int = -1) -> tuple[Tensor, Tensor]:
        """(features, the stream after a block: the features again where there is no such block)."""
        num_crops, blocks = len(patches_NPC), self._blocks()
        x_TD = self._embed_patches(patches_NPC)
        early_TD: Tensor | None = None
        to_fp8 = blocks[0].attn.qkv.takes_fp8_rows(x_TD)
        x_TD, y = blocks[0].ln1.of_sum(x_TD, (self.pos_emb[0],), to_fp8=to_fp8)
        next_norms = [*(block.ln1 for block in blocks[1:]), self.post_ln]
        for index, (block, next_norm) in enumerate(zip(blocks, next_norms, strict=True)):
            x_TD, y = block(x_TD, y, num_crops, next_norm, to_fp8=to_fp8 and next_norm is not self.post_ln)
            if index == early_block:
                shift_D = next_norm.shift_D
                early_TD = x_TD if shift_D is None else (x_TD + shift_D).to(x_TD.dtype)
        features_NPD = cast(Tensor, y).unflatten(0, (num_crops, -1))
        return features_NPD, features_NPD if early_TD is None else early_TD.unflatten(0, (num_crops, -1))

    def _embed_patches(self, patches_NPC: Tensor) -> Tensor:
        """[N · grid², enc_dim] without positions, of patches with zeros behind them, as `patchify` makes them, or
        without."""
        assert patches_NPC.ndim == 3
        assert patches_NPC.shape[1] == self.grid**2
        missing = self.patch_emb.weight.shape[1] - patches_NPC.shape[2]
        padded_NPC = functional.pad(patches_NPC, (0, missing)) if missing else patches_NPC
        return self.patch_emb(padded_NPC.flatten(0, 1))

    def _blocks(self) -> list[VisionBlock]:
        return cast("list[VisionBlock]", list(self.blocks))

    def embed_image(self, features_NPD: Tensor, tiles_hw: tuple[int, int]) -> Tensor:
        """Image embeddings [grid², text dim] from the features of crop 0 and then the tiles, row by row.

        With one tile it shows the same pixels as crop 0, so crop 0 alone will do.
        """
        return self.embed_images([features_NPD], [tiles_hw])[0]

    def embed_images(self, features: Sequence[Tensor], tiles: Sequence[tuple[int, int]]) -> list[Tensor]:
        """`embed_image` of several pictures, projected together."""
        joined = [
            self.ops.join_crops(one_NPD, tiles_hw, self.overlap_margin)
            for one_NPD, tiles_hw in zip(features, tiles, strict=True)
        ]
        return list(self.proj_mlp(torch.cat(joined)).split(self.grid**2))
