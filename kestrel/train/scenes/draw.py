"""Drawing scenes in batches with torch, and what happens to the pictures afterwards.

What is drawn depends on the batch alone, noise included: no generator state, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from kestrel.train.scenes.random_numbers import SceneRandom
from kestrel.train.scenes.sampling import CHECKS, DOTS, GRADIENT, MAX_BLUR_PX, NOISE, STRIPES
from kestrel.train.scenes.textures import AtlasTensors, Stamps, stamps_of, upload
from kestrel.train.scenes.truth import SceneBatch

# ---------------------------------------------------------------------- effects
# What happens to pictures [B, H, W, 3] after drawing: brightness and contrast, blur, noise, JPEG artefacts.
#
# Every effect touches only the scenes that ask for it, and each scene's result is its own: no number of one scene
# depends on another. Noise is a hash of (seed, pixel), so it is the same on every device.


NOISE_SALT = 0x9015E
BLUR_REACH_PX = math.ceil(2.5 * MAX_BLUR_PX)
_FIRST_FACTOR = 0x7FEB352D
_SECOND_FACTOR = 0x846CA68B - 2**32
_BITS_PER_CHANNEL = 10


def change_light(pictures: torch.Tensor, brightness: NDArray[np.float32], contrast: NDArray[np.float32]) -> None:
    """In place: brightness as a factor, then contrast around middle grey."""
    factor = upload(brightness * contrast, pictures.device)
    shift = upload(0.5 - 0.5 * contrast, pictures.device)
    pictures.mul_(factor[:, None, None, None]).add_(shift[:, None, None, None]).clamp_(0, 1)


def blur(pictures: torch.Tensor, sigma: NDArray[np.float32]) -> torch.Tensor:
    """Gaussian blur of each picture by its own sigma > 0 in pixels; edges are repeated outwards."""
    reach = torch.arange(-BLUR_REACH_PX, BLUR_REACH_PX + 1, device=pictures.device)
    widths = upload(sigma, pictures.device)[:, None]
    weights = torch.exp(-0.5 * (reach / widths.clamp(min=1e-3)) ** 2)
    weights = weights / weights.sum(1, keepdim=True)
    return _weighted_shifts(_weighted_shifts(pictures, weights, 1), weights, 2)


def add_noise(pictures: torch.Tensor, seeds: NDArray[np.int64], strength: NDArray[np.float32]) -> torch.Tensor:
    """Even noise of the given standard deviation, different in every channel."""
    num_pictures, height, width, channels = pictures.shape
    start = (SceneRandom(seeds, NOISE_SALT).uniform() * 2**32).astype(np.int64) - 2**31
    starts = upload(start.astype(np.int32), pictures.device)[:, None]
    pixel = torch.arange(height * width, dtype=torch.int32, device=pictures.device)
    bits = _mixed(_mixed(pixel)[None] ^ starts).view(num_pictures, height, width)
    amplitude = upload(strength * np.float32(math.sqrt(12)), pictures.device)[:, None, None]
    mask = 2**_BITS_PER_CHANNEL - 1
    for channel in range(channels):
        share = ((bits >> (channel * _BITS_PER_CHANNEL)) & mask).float() * (1 / mask) - 0.5
        pictures[..., channel] += share * amplitude
    return pictures.clamp_(0, 1)


def _weighted_shifts(pictures: torch.Tensor, weights: torch.Tensor, axis: int) -> torch.Tensor:
    """Sum of the pictures shifted along an axis, weights [B, shifts]"""
    channels_first = pictures.permute(0, 3, 1, 2)
    padding = (0, 0, BLUR_REACH_PX, BLUR_REACH_PX) if axis == 1 else (BLUR_REACH_PX, BLUR_REACH_PX, 0, 0)
    padded = functional.pad(channels_first, padding, mode="replicate").permute(0, 2, 3, 1)
    total = torch.zeros_like(pictures)
    for shift, weight in enumerate(weights.unbind(1)):
        total.addcmul_(padded.narrow(axis, shift, pictures.shape[axis]), weight[:, None, None, None])
    return total


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    """A 32-bit hash; shifts of int32 keep the sign, so their upper bits are cut off."""
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * _FIRST_FACTOR
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * _SECOND_FACTOR
    return bits ^ ((bits >> 16) & 0xFFFF)


# ---------------------------------------------------------------------- JPEG artefacts
# The lossy half of a JPEG encoder, 8x8 cosine transform and quantisation, without the packing. Chrominance keeps its
# full resolution (4:4:4).

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


# ---------------------------------------------------------------------- stamps
# The same code on a CPU and a GPU.
#
# Slot by slot, the pixels under all stamps of all scenes form one long list; each pixel filters its four nearest texels
# and is blended into its picture. Work grows with the area drawn on, not with the number of pictures times slots.


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
