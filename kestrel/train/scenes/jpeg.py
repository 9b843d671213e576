"""JPEG artefacts: the lossy half of a JPEG encoder, 8x8 cosine transform and quantisation, without the packing.

Chrominance keeps its full resolution (4:4:4).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from kestrel.train.scenes.upload import upload

BLOCK = 8

# Quantisation tables of the JPEG standard, annex K.
LUMINANCE = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)
CHROMINANCE = (
    (17, 18, 24, 47, 99, 99, 99, 99),
    (18, 21, 26, 66, 99, 99, 99, 99),
    (24, 26, 56, 99, 99, 99, 99, 99),
    (47, 66, 99, 99, 99, 99, 99, 99),
    *(((99,) * 8,) * 4),
)
TO_YCC = ((0.299, 0.587, 0.114), (-0.168736, -0.331264, 0.5), (0.5, -0.418688, -0.081312))


def jpeg_artefacts(pictures: torch.Tensor, quality: NDArray[np.int16]) -> torch.Tensor:
    """[B, H, W, 3] pictures from 0 to 1 as they look after JPEG of each one's quality from 1 to 100."""
    _, height, width, _ = pictures.shape
    padded = functional.pad(pictures.permute(0, 3, 1, 2), (0, -width % BLOCK, 0, -height % BLOCK), mode="replicate")
    ycc = _recoloured(padded * 255, np.array(TO_YCC))
    ycc[:, 0] -= 128
    tables = upload(quantisation_tables(quality), pictures.device)
    transform = upload(_cosine_transform(), pictures.device)
    blocks = _to_blocks(ycc) @ transform.T
    blocks = torch.round(blocks / tables[:, :, None]) * tables[:, :, None]
    ycc = _from_blocks(blocks @ transform, padded.shape)
    ycc[:, 0] += 128
    rgb = _recoloured(ycc, np.linalg.inv(TO_YCC)) / 255
    return rgb[:, :, :height, :width].permute(0, 2, 3, 1).clamp(0, 1)


def quantisation_tables(quality: NDArray[np.int16]) -> NDArray[np.float32]:
    """[B, 3, 64] steps for Y, Cb and Cr, scaled by quality as libjpeg does"""
    wide = quality.astype(np.int64)
    scale = np.where(wide < 50, 5000 // np.maximum(wide, 1), 200 - 2 * wide)[:, None, None]
    base = np.array([LUMINANCE, CHROMINANCE, CHROMINANCE]).reshape(3, BLOCK * BLOCK)
    return np.clip((base * scale + 50) // 100, 1, 255).astype(np.float32)


def _recoloured(planes: torch.Tensor, matrix: NDArray[np.floating]) -> torch.Tensor:
    """Every output plane a weighted sum of the input planes of [B, 3, H, W]"""
    a, b, c = planes.unbind(1)
    return torch.stack([a * row[0] + b * row[1] + c * row[2] for row in matrix.tolist()], dim=1)


def _cosine_transform() -> NDArray[np.float32]:
    """[64, 64] the two-dimensional cosine transform of a block laid out in a row; its transpose undoes it"""
    frequency, place = np.arange(BLOCK)[:, None], np.arange(BLOCK)[None, :]
    line = np.sqrt(2 / BLOCK) * np.cos((2 * place + 1) * frequency * np.pi / (2 * BLOCK))
    line[0] /= np.sqrt(2)
    return np.kron(line, line).astype(np.float32)


def _to_blocks(planes: torch.Tensor) -> torch.Tensor:
    """[B, 3, blocks, 64]"""
    num_pictures, channels, height, width = planes.shape
    tiled = planes.reshape(num_pictures, channels, height // BLOCK, BLOCK, width // BLOCK, BLOCK)
    return tiled.transpose(3, 4).reshape(num_pictures, channels, -1, BLOCK * BLOCK)


def _from_blocks(blocks: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    num_pictures, channels, height, width = shape
    tiled = blocks.reshape(num_pictures, channels, height // BLOCK, width // BLOCK, BLOCK, BLOCK)
    return tiled.transpose(3, 4).reshape(shape)
