"""How a picture is cut: one global crop, and a grid of overlapping local crops for larger pictures."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kestrel.errors import ConfigError


@dataclass(frozen=True)
class TilingParams:
    """What a vision encoder fixes about its crops."""

    crop_size: int
    """Side of a crop in pixels."""
    patch_size: int
    """Side of a patch in pixels."""
    overlap_margin: int
    """Patches at each side of a crop that repeat its neighbours."""
    max_crops: int
    """Local crops aimed for; a picture far from square may get more."""

    def __post_init__(self) -> None:
        if self.patch_size < 1 or self.crop_size < 1 or self.crop_size % self.patch_size:
            raise ConfigError(
                "crop_size", f"must be a multiple of patch_size (got {self.crop_size} and {self.patch_size})"
            )
        if self.overlap_margin < 0 or self.window_px < 1:
            raise ConfigError(
                "overlap_margin", f"must leave part of a {self.crop_size} pixel crop (got {self.overlap_margin})"
            )
        if self.max_crops < 1:
            raise ConfigError("max_crops", f"must be at least 1 (got {self.max_crops})")

    @property
    def margin_px(self) -> int:
        return self.overlap_margin * self.patch_size

    @property
    def window_px(self) -> int:
        """Distance between neighbouring local crops: a crop without its two margins."""
        return self.crop_size - 2 * self.margin_px

    @property
    def grid(self) -> int:
        """Patches along one side of a crop."""
        return self.crop_size // self.patch_size


@dataclass(frozen=True)
class TilingPlan:
    """The cut of one picture of a given size."""

    params: TilingParams
    height: int
    width: int
    rows: int
    cols: int

    @property
    def resized_height(self) -> int:
        """Height the picture is resized to before local crops are taken."""
        return self.rows * self.params.window_px + 2 * self.params.margin_px

    @property
    def resized_width(self) -> int:
        return self.cols * self.params.window_px + 2 * self.params.margin_px

    @property
    def has_distinct_locals(self) -> bool:
        """False for a 1x1 grid: its only local crop equals the global crop, so it is made and encoded once."""
        return self.rows * self.cols > 1

    @property
    def num_crops(self) -> int:
        """Crops that are made: the global one, and the local ones when they differ from it."""
        return 1 + (self.rows * self.cols if self.has_distinct_locals else 0)

    @property
    def local_crop_indices(self) -> tuple[int, ...]:
        """Where the local crops, row by row, are among the crops that are made."""
        return tuple(range(1, self.num_crops)) if self.has_distinct_locals else (0,)

    @property
    def local_origins(self) -> tuple[tuple[int, int], ...]:
        """(top, left) of each local crop in the resized picture, row by row."""
        step = self.params.window_px
        return tuple((row * step, col * step) for row in range(self.rows) for col in range(self.cols))


def plan_tiling(height: int, width: int, params: TilingParams) -> TilingPlan:
    rows, cols = select_tiling(height, width, params)
    return TilingPlan(params=params, height=height, width=width, rows=rows, cols=cols)


def select_tiling(height: int, width: int, params: TilingParams) -> tuple[int, int]:
    """(rows, cols) of local crops for a picture of this size: about `max_crops`, near the picture's own shape."""
    window, max_crops = params.window_px, params.max_crops
    height, width = height - 2 * params.margin_px, width - 2 * params.margin_px
    if height <= window or width <= window:
        return 1, 1
    min_rows, min_cols = math.ceil(height / window), math.ceil(width / window)
    if min_rows * min_cols > max_crops:
        shrink = math.sqrt(max_crops / (min_rows * min_cols))
        return max(1, math.floor(min_rows * shrink)), max(1, math.floor(min_cols * shrink))
    rows = max(math.floor(math.sqrt(max_crops * height / width)), min_rows)
    cols = max(math.floor(math.sqrt(max_crops * width / height)), min_cols)
    if rows * cols > max_crops:
        if cols > rows:
            cols = max_crops // rows
        else:
            rows = max_crops // cols
    return max(1, rows), max(1, cols)
