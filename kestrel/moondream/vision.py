"""The vision tower: crops to features, features of all tiles to one embedding per grid cell.

A crop is a grid × grid field of patches. Crop 0 shows the whole picture; the others are overlapping tiles of it, which
are encoded alone, stitched without their margins, averaged back to the grid and projected together with crop 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from kestrel.models.layers import GeluMlp
from kestrel.moondream.config import VisionConfig


@dataclass(frozen=True)
class VisionFeatures:
    """Features of N crops, each [N, grid², enc_dim]."""

    final: Tensor
    early: Tensor
    """The residual stream after an inner block."""


class VisionAttention(nn.Module):
    """Every patch of a crop attends to every other."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.n_heads = config.enc_n_heads
        self.qkv = nn.Linear(config.enc_dim, 3 * config.enc_dim)
        self.proj = nn.Linear(config.enc_dim, config.enc_dim)

    def forward(self, x_NPD: Tensor) -> Tensor:
        n, p, _ = x_NPD.shape
        q, k, v = self.qkv(x_NPD).view(n, p, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        out_NHPd = functional.scaled_dot_product_attention(q, k, v)
        return self.proj(out_NHPd.transpose(1, 2).flatten(2))


class VisionBlock(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(config.enc_dim)
        self.attn = VisionAttention(config)
        self.ln2 = nn.LayerNorm(config.enc_dim)
        self.mlp = GeluMlp(config.enc_dim, config.enc_ff_dim, config.enc_dim)

    def forward(self, x_NPD: Tensor) -> Tensor:
        x_NPD = x_NPD + self.attn(self.ln1(x_NPD))
        return x_NPD + self.mlp(self.ln2(x_NPD))


class VisionModel(nn.Module):
    """Encoder and projector; parameters carry the names of the published checkpoints."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.grid = config.grid
        self.overlap_margin = config.overlap_margin
        self.patch_emb = nn.Linear(config.patch_dim, config.enc_dim)
        self.pos_emb = nn.Parameter(torch.zeros(1, config.num_patches, config.enc_dim))
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.enc_n_layers))
        self.post_ln = nn.LayerNorm(config.enc_dim)
        self.proj_mlp = GeluMlp(2 * config.enc_dim, config.proj_inner_dim, config.proj_out_dim)

    def encode_crops(self, patches_NPC: Tensor) -> Tensor:
        """[N, grid², 3·patch²] normalised pixels (channel, row, column) to [N, grid², enc_dim]."""
        x_NPD = self._embed_patches(patches_NPC)
        for block in self.blocks:
            x_NPD = block(x_NPD)
        return self.post_ln(x_NPD)

    def encode_crops_with_early(self, patches_NPC: Tensor, early_block: int) -> VisionFeatures:
        """As `encode_crops`, and the stream right after block index `early_block`."""
        assert 0 <= early_block < len(self.blocks)
        x_NPD = early_NPD = self._embed_patches(patches_NPC)
        for index, block in enumerate(self.blocks):
            x_NPD = block(x_NPD)
            if index == early_block:
                early_NPD = x_NPD
        return VisionFeatures(final=self.post_ln(x_NPD), early=early_NPD)

    def embed_image(self, features_NPD: Tensor, tiles_hw: tuple[int, int]) -> Tensor:
        """Image embeddings [grid², text dim] from the features of crop 0 and then the tiles, row by row.

        With one tile it shows the same pixels as crop 0, so crop 0 alone will do.
        """
        return self.embed_images([features_NPD], [tiles_hw])[0]

    def embed_images(self, features: Sequence[Tensor], tiles: Sequence[tuple[int, int]]) -> list[Tensor]:
        """`embed_image` of several pictures, projected together."""
        pooled = [self._pooled_tiles(one_NPD, tiles_hw) for one_NPD, tiles_hw in zip(features, tiles, strict=True)]
        projected = self.project(torch.cat([one_NPD[0] for one_NPD in features]), torch.cat(pooled))
        return list(projected.split(self.grid**2))

    def _pooled_tiles(self, features_NPD: Tensor, tiles_hw: tuple[int, int]) -> Tensor:
        num_tiles = tiles_hw[0] * tiles_hw[1]
        if num_tiles == 1 and features_NPD.shape[0] == 1:
            return features_NPD[0]
        assert features_NPD.shape[0] == 1 + num_tiles, "one global crop and every tile, no more and no less"
        local = features_NPD[1:].unflatten(1, (self.grid, self.grid))
        return self.pool(stitch(local, tiles_hw, self.overlap_margin))

    def pool(self, features_HWD: Tensor) -> Tensor:
        """Averages a stitched map back to one row per grid cell: [grid², D]."""
        pooled = functional.adaptive_avg_pool2d(features_HWD.permute(2, 0, 1), self.grid)
        return pooled.flatten(1).transpose(0, 1)

    def project(self, global_PD: Tensor, pooled_PD: Tensor) -> Tensor:
        return self.proj_mlp(torch.cat([global_PD, pooled_PD], dim=1))

    def _embed_patches(self, patches_NPC: Tensor) -> Tensor:
        assert patches_NPC.ndim == 3
        assert patches_NPC.shape[1] == self.grid**2
        return self.patch_emb(patches_NPC) + self.pos_emb


def stitch(local_NGGD: Tensor, tiles_hw: tuple[int, int], margin: int) -> Tensor:
    """One map [H, W, D] from overlapping tiles, row by row; the margin is cut wherever a neighbour lies."""
    tiles_h, tiles_w = tiles_hw
    assert local_NGGD.ndim == 4
    assert local_NGGD.shape[0] == tiles_h * tiles_w
    grid = local_NGGD.shape[1]

    def kept(index: int, count: int) -> slice:
        return slice(margin if index > 0 else 0, grid - margin if index < count - 1 else grid)

    rows = []
    for i in range(tiles_h):
        tiles = [local_NGGD[i * tiles_w + j, kept(i, tiles_h), kept(j, tiles_w)] for j in range(tiles_w)]
        rows.append(torch.cat(tiles, dim=1))
    return torch.cat(rows, dim=0)
