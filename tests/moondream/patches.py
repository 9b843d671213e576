"""Pixels to the patches the vision model reads."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kestrel.images.crops import make_crops, normalise_and_patchify
from kestrel.images.picture import TilingParams, plan_tiling
from kestrel.moondream.config import VisionConfig


def image_patches(pixels_HWC: np.ndarray, config: VisionConfig) -> tuple[Tensor, tuple[int, int]]:
    """(patches [crops, grid², 3·patch²] fp32, tiles_hw)."""
    params = TilingParams(config.crop_size, config.enc_patch_size, config.overlap_margin, config.max_crops)
    plan = plan_tiling(pixels_HWC.shape[0], pixels_HWC.shape[1], params)
    crops = make_crops(torch.from_numpy(pixels_HWC.copy()), plan)
    return normalise_and_patchify(crops, config.enc_patch_size, torch.float32), (plan.rows, plan.cols)
