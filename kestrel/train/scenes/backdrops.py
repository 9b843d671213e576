"""Drawing backgrounds: how far every pixel is on the way from a scene's first background colour to its second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from kestrel.train.scenes.backdrop_choice import CHECKS, DOTS, GRADIENT, NOISE, STRIPES
from kestrel.train.scenes.random_numbers import SceneRandom
from kestrel.train.scenes.truth import SceneBatch
from kestrel.train.scenes.upload import upload

TEXTURE_SALT = 0x7E87
PERIOD = (0.04, 0.16)
"""Width of a stripe, check or dot with its gap, by the shorter side of the picture."""
DOT_RADIUS = 0.3
"""By the period."""
NOISE_GRIDS = ((5, 0.5), (17, 0.3), (65, 0.2))
"""(cells along a side, weight) of the layers of noise."""


@dataclass(frozen=True, eq=False)
class TurnedGrid:
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


def _turned_grid(batch: SceneBatch, rows: NDArray[np.int64], device: torch.device) -> TurnedGrid:
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
    return TurnedGrid(x * cos + y * sin, y * cos - x * sin, periods, corners)


def _gradient(grid: TurnedGrid) -> torch.Tensor:
    return 0.5 + 0.5 * grid.along / grid.corner


def _stripes(grid: TurnedGrid) -> torch.Tensor:
    return 0.5 + 0.5 * _square_wave(grid.along, grid.period)


def _checks(grid: TurnedGrid) -> torch.Tensor:
    return 0.5 + 0.5 * _square_wave(grid.along, grid.period) * _square_wave(grid.across, grid.period)


def _dots(grid: TurnedGrid) -> torch.Tensor:
    x, y = (torch.remainder(place, grid.period) - grid.period / 2 for place in (grid.along, grid.across))
    return (0.5 + DOT_RADIUS * grid.period - torch.hypot(x, y)).clamp(0, 1)


_MIXES: dict[int, Callable[[TurnedGrid], torch.Tensor]] = {
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
