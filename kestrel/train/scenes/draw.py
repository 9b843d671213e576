"""Drawing scenes in batches with torch: the same code on a CPU and a GPU.

Slot by slot, the pixels under all stamps of all scenes form one long list; each pixel filters its four nearest texels
and is blended into its picture. Work grows with the area drawn on, not with the number of pictures times slots.
What is drawn depends on the batch alone, noise included (see `effects.py`): no generator state, no clock.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kestrel.train.scenes.backdrops import draw_backdrops
from kestrel.train.scenes.effects import add_noise, blur, change_light
from kestrel.train.scenes.jpeg import jpeg_artefacts
from kestrel.train.scenes.stamps import Stamps, stamps_of
from kestrel.train.scenes.textures import AtlasTensors
from kestrel.train.scenes.truth import SceneBatch
from kestrel.train.scenes.upload import upload


@torch.no_grad()
def draw_batch(batch: SceneBatch, atlas_tensors: AtlasTensors) -> torch.Tensor:
    """[B, H, W, 3] uint8 pictures on the device of the atlas tensors."""
    pictures = draw_backdrops(batch, atlas_tensors.device)
    _stamp_all(pictures, stamps_of(batch, atlas_tensors), atlas_tensors)
    _damage(pictures, batch)
    return pictures.mul_(255).round_().to(torch.uint8)


def _damage(pictures: torch.Tensor, batch: SceneBatch) -> None:
    change_light(pictures, batch.brightness, batch.contrast)
    rows = np.flatnonzero(batch.blur)
    if len(rows):
        at = upload(rows, pictures.device)
        pictures[at] = blur(pictures[at], batch.blur[rows])
    rows = np.flatnonzero(batch.noise)
    if len(rows):
        at = upload(rows, pictures.device)
        pictures[at] = add_noise(pictures[at], batch.seeds[rows], batch.noise[rows])
    rows = np.flatnonzero(batch.jpeg_quality)
    if len(rows):
        at = upload(rows, pictures.device)
        pictures[at] = jpeg_artefacts(pictures[at], batch.jpeg_quality[rows])


def _stamp_all(pictures: torch.Tensor, stamps: Stamps, textures: AtlasTensors) -> None:
    flat = pictures.view(-1, pictures.shape[-1])
    whole, real = _stamp_numbers(stamps, textures, pictures.shape[1:3])
    whole_numbers, real_numbers = upload(whole, flat.device), upload(real, flat.device)
    areas = (stamps.clip[:, 2] - stamps.clip[:, 0]) * (stamps.clip[:, 3] - stamps.clip[:, 1])
    for first, end in stamps.slot_bounds():
        num_pixels = int(areas[first:end].sum())
        if num_pixels:
            places, colours = _stamped_pixels(
                whole_numbers[first:end], real_numbers[first:end], num_pixels, pictures.shape[2], textures.texels
            )
            flat[places] = flat[places] * (1 - colours[:, 3:]) + colours[:, :3]


def _stamp_numbers(
    stamps: Stamps, textures: AtlasTensors, picture: torch.Size
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """What the pixels of a stamp need to know: whole numbers [N, 6] and real numbers [N, 7].

    Whole: pixels, columns, first pixel in the flat canvas, first texel, texel columns and rows.
    Real: texel = step * pixel + start for x and y, and the tint.
    """
    height, width = picture
    size = textures.sizes[stamps.texture, stamps.level]
    columns, rows = stamps.clip[:, 2] - stamps.clip[:, 0], stamps.clip[:, 3] - stamps.clip[:, 1]
    corner = (stamps.scene * height + stamps.clip[:, 1]) * width + stamps.clip[:, 0]
    offset = textures.offsets[stamps.texture, stamps.level]
    whole = np.stack([columns * rows, columns, corner, offset, size[:, 1], size[:, 0]])
    step = size[:, ::-1] / (stamps.edges[:, 2:] - stamps.edges[:, :2])
    # Centre of the clip's first pixel, in texels from the border's first texel centre.
    start = (stamps.clip[:, :2] + 0.5 - stamps.edges[:, :2]) * step + 0.5
    start[:, 0] = np.where(stamps.is_flipped, size[:, 1] + 1 - start[:, 0], start[:, 0])
    step[:, 0] = np.where(stamps.is_flipped, -step[:, 0], step[:, 0])
    real = np.concatenate([step, start, stamps.tint], axis=1)
    return np.ascontiguousarray(whole.T), real.astype(np.float32)


def _stamped_pixels(
    whole: torch.Tensor, real: torch.Tensor, num_pixels: int, width: int, texels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Places in the flat canvas [num_pixels] under some stamps, and what they show there [num_pixels, 4]."""
    areas = whole[:, 0]
    stamp = torch.repeat_interleave(torch.arange(len(areas), device=whole.device), areas, output_size=num_pixels)
    local = torch.arange(num_pixels, device=whole.device) - (areas.cumsum(0) - areas)[stamp]
    _, columns, corner, offset, texel_columns, texel_rows = whole[stamp].unbind(1)
    numbers = real[stamp]
    x_step, y_step, x_start, y_start = numbers[:, :4].unbind(1)
    row = torch.div(local, columns, rounding_mode="floor")
    column = local - row * columns
    level = offset, texel_columns, texel_rows
    colours = _filtered(texels, column * x_step + x_start, row * y_step + y_start, level)
    colours[:, :3] *= numbers[:, 4:]
    return corner + row * width + column, colours


def _filtered(
    texels: torch.Tensor, x: torch.Tensor, y: torch.Tensor, level: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """[pixels, 4] from 0 to 1: the mean of the four texels around (x, y), weighted by nearness"""
    offset, columns, rows = level
    x, y = torch.minimum(x.clamp_(min=0), columns + 1.0), torch.minimum(y.clamp_(min=0), rows + 1.0)
    left, top = torch.minimum(x.long(), columns), torch.minimum(y.long(), rows)
    x_share, y_share = (x - left)[:, None], (y - top)[:, None]
    stride = columns + 2
    first = offset + top * stride + left
    upper = torch.lerp(_unpacked(texels[first]), _unpacked(texels[first + 1]), x_share)
    first += stride
    lower = torch.lerp(_unpacked(texels[first]), _unpacked(texels[first + 1]), x_share)
    return torch.lerp(upper, lower, y_share).mul_(1 / 255)


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    return packed.view(torch.uint8).view(-1, 4).float()
