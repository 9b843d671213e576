"""Drawing scenes in batches with torch: the same code on a CPU and a GPU.

Slot by slot, the pixels under all stamps of all scenes form one long list; each pixel filters its four nearest texels
and is blended into its picture. Work grows with the area drawn on, not with the number of pictures times slots.
What is drawn depends on the batch alone, noise included (see `effects.py`): no generator state, no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from kestrel.train.scenes.effects import add_noise, blur, change_light, jpeg_artefacts
from kestrel.train.scenes.random_numbers import SceneRandom
from kestrel.train.scenes.sampling import CHECKS, DOTS, GRADIENT, NOISE, STRIPES
from kestrel.train.scenes.textures import AtlasTensors, Stamps, stamps_of, upload
from kestrel.train.scenes.truth import SceneBatch


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


# ---------------------------------------------------------------------- backgrounds
# How far every pixel is on the way from a scene's first background colour to its second.

TEXTURE_SALT = 0x7E87
PERIOD = (0.04, 0.16)
"""Width of a stripe, check or dot with its gap, by the shorter side of the picture."""
DOT_RADIUS = 0.3
"""By the period."""
NOISE_GRIDS = ((5, 0.5), (17, 0.3), (65, 0.2))
"""(cells along a side, weight) of the layers of noise."""


@dataclass(frozen=True, eq=False)
class _TurnedGrid:
    """Pixels seen along the angles of some scenes."""

    along: torch.Tensor  # [rows, H, W] pixels from the centre in the direction of the angle
    across: torch.Tensor  # [rows, H, W] pixels from the centre square to it
    period: torch.Tensor  # [rows, 1, 1] of textures, in pixels
    corner: torch.Tensor  # [rows, 1, 1] the longest way along, to a corner


def draw_backdrops(batch: SceneBatch, device: torch.device) -> torch.Tensor:
    """[B, H, W, 3] float32 from 0 to 1"""
    colours = upload(batch.background_colours, device)
    canvas = colours[:, 0, None, None, :].expand(-1, batch.height, batch.width, -1).contiguous()
    for style, mix in _MIXES.items():
        rows = np.flatnonzero(batch.background == style)
        if len(rows):
            _blend_rows(canvas, rows, mix(_turned_grid(batch, rows, device)), colours)
    rows = np.flatnonzero(batch.background == NOISE)
    if len(rows):
        _blend_rows(canvas, rows, _noise(batch, rows, device), colours)
    return canvas


def _blend_rows(canvas: torch.Tensor, rows: NDArray[np.int64], share: torch.Tensor, colours: torch.Tensor) -> None:
    at = upload(rows, canvas.device)
    first, second = colours[at, 0, None, None, :], colours[at, 1, None, None, :]
    canvas[at] = first + share[..., None] * (second - first)


def _turned_grid(batch: SceneBatch, rows: NDArray[np.int64], device: torch.device) -> _TurnedGrid:
    angle = batch.angle[rows].astype(np.float64)
    cosine, sine = np.cos(angle), np.sin(angle)
    low, high = PERIOD
    share = low + (high - low) * SceneRandom(batch.seeds[rows], TEXTURE_SALT).uniform()
    period = share * min(batch.height, batch.width)
    corner = (np.abs(cosine) * batch.width + np.abs(sine) * batch.height) / 2
    numbers = np.stack([cosine, sine, period, corner]).astype(np.float32)[:, :, None, None]
    cos, sin, periods, corners = upload(numbers, device).unbind(0)
    x = torch.arange(batch.width, device=device) + 0.5 - batch.width / 2
    y = torch.arange(batch.height, device=device)[:, None] + 0.5 - batch.height / 2
    return _TurnedGrid(x * cos + y * sin, y * cos - x * sin, periods, corners)


def _gradient(grid: _TurnedGrid) -> torch.Tensor:
    return 0.5 + 0.5 * grid.along / grid.corner


def _stripes(grid: _TurnedGrid) -> torch.Tensor:
    return 0.5 + 0.5 * _square_wave(grid.along, grid.period)


def _checks(grid: _TurnedGrid) -> torch.Tensor:
    return 0.5 + 0.5 * _square_wave(grid.along, grid.period) * _square_wave(grid.across, grid.period)


def _dots(grid: _TurnedGrid) -> torch.Tensor:
    x, y = (torch.remainder(place, grid.period) - grid.period / 2 for place in (grid.along, grid.across))
    return (0.5 + DOT_RADIUS * grid.period - torch.hypot(x, y)).clamp(0, 1)


_MIXES: dict[int, Callable[[_TurnedGrid], torch.Tensor]] = {
    GRADIENT: _gradient,
    STRIPES: _stripes,
    CHECKS: _checks,
    DOTS: _dots,
}


def _square_wave(place: torch.Tensor, period: torch.Tensor) -> torch.Tensor:
    """-1 and 1 for half a period each, with edges one pixel wide"""
    half = period / 2
    to_edge = half / 2 - torch.abs(torch.remainder(place, period) - half)
    return (to_edge * 2).clamp(-1, 1)


def _noise(batch: SceneBatch, rows: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """[rows, H, W] from 0 to 1: random grids, smoothly enlarged, summed"""
    random = SceneRandom(batch.seeds[rows], TEXTURE_SALT)
    layers = []
    for cells, weight in NOISE_GRIDS:
        grid = upload(random.uniform(1, cells, cells).astype(np.float32), device)
        size = (batch.height, batch.width)
        layers.append(weight * functional.interpolate(grid, size=size, mode="bilinear", align_corners=True)[:, 0])
    return torch.stack(layers).sum(0)
