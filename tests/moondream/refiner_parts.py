"""Small refiner heads, an encoder and pictures to refine with."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kestrel.moondream.refiner import Pixels, RefinerConfig, RefinerHead

TINY = RefinerConfig(enc_dim=8, embed_dim=32, num_layers=1, grid=4, mask_size=56)
SQUARE = "M 0 0 L 1 0 L 1 1 L 0 1 Z"


def box(x_min: float, y_min: float, x_max: float, y_max: float) -> dict[str, float]:
    return {"x_min": x_min, "y_min": y_min, "x_max": x_max, "y_max": y_max}


class GreyEncoder:
    """Features that only tell how bright each patch is; keeps the crops it saw."""

    def __init__(self, config: RefinerConfig) -> None:
        self.config = config
        self.crops: list[Pixels] = []

    def __call__(self, crop_HWC: Pixels, /) -> tuple[Tensor, Tensor]:
        self.crops.append(crop_HWC)
        side = self.config.mask_size // self.config.grid
        grey = torch.from_numpy(crop_HWC.astype(np.float32)).mean(dim=2) / 255
        patches = grey.unfold(0, side, side).unfold(1, side, side).mean(dim=(2, 3)).reshape(1, -1, 1)
        features = patches.expand(-1, -1, self.config.enc_dim).contiguous()
        return features, features.flip(2)


class EchoHead(RefinerHead):
    """Gives its mask back, slightly grown more certain, as the third of four masks."""

    def forward(self, final_features: Tensor, early_features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        logits = torch.full((1, 4, *mask.shape[1:]), -9.0)
        logits[:, 2] = mask * 12 - 6
        return logits, torch.tensor([[0.1, 0.2, 0.9, 0.3]])


class SilentHead(RefinerHead):
    """Sees nothing anywhere."""

    def forward(self, final_features: Tensor, early_features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return torch.full((1, 4, *mask.shape[1:]), -9.0), torch.zeros(1, 4)


class NoisyHead(RefinerHead):
    """Sets blocks of 4 pixels at random: too large to be cleaned away in a picture of its own size, and many."""

    def forward(self, final_features: Tensor, early_features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        blocks = torch.rand(1, 4, 95, 95).round().repeat_interleave(4, 2).repeat_interleave(4, 3)
        return blocks[:, :, : mask.shape[1], : mask.shape[2]] * 18 - 9, torch.ones(1, 4)


def gradient(height: int, width: int) -> Pixels:
    columns, rows = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return np.stack([columns, rows, (columns + rows) / 2], axis=2).astype(np.uint8)
