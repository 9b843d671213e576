"""The pictures of held-out scenes. They are always drawn on the CPU, so that all models see the same pixels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kestrel.errors import ConfigError
from kestrel.evals.plan import HELD_OUT_DIFFICULTY
from kestrel.images.rgb import RgbImage
from kestrel.train.scenes.atlas import SpriteAtlas, load_or_build_atlas, missing_fonts
from kestrel.train.scenes.draw import draw_batch
from kestrel.train.scenes.sampling import sample_batch
from kestrel.train.scenes.textures import upload_atlas

PIXELS_AT_ONCE = 2**24
MAX_SCENES_AT_ONCE = 64


def open_atlas(path: Path) -> SpriteAtlas:
    """The atlas at `path`; built from this machine's fonts and saved there when there is none."""
    if not path.exists() and (missing := missing_fonts()):
        raise ConfigError(
            "atlas",
            f"there is no {path}, and building it needs fonts this machine lacks ({', '.join(missing)}); "
            "install them with scripts/install-fonts, or bring an atlas from a machine that has them",
        )
    return load_or_build_atlas(path)


def num_held_at_once(size: tuple[int, int]) -> int:
    """How many pictures of a height and width to draw and hold in memory together."""
    return min(max(PIXELS_AT_ONCE // (size[0] * size[1]), 1), MAX_SCENES_AT_ONCE)


class ScenePictures:
    """Draws held-out scenes of one size."""

    def __init__(self, atlas: SpriteAtlas, size: tuple[int, int]) -> None:
        self._textures = upload_atlas(atlas)
        self._size = size

    def draw(self, seeds: Sequence[int]) -> list[RgbImage]:
        batch = sample_batch(np.array(seeds, np.int64), *self._size, HELD_OUT_DIFFICULTY)
        return [RgbImage.from_pixels(pixels) for pixels in draw_batch(batch, self._textures).numpy()]
