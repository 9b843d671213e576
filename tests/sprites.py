"""The sprites that tests draw scenes with: from the fonts where they are installed, else from a saved atlas."""

from __future__ import annotations

import os
import tempfile
from functools import cache, lru_cache
from hashlib import blake2b
from pathlib import Path

import numpy as np
import PIL
import pytest
import torch

from kestrel.train.options import DEFAULT_ATLAS_PATH
from kestrel.train.scenes.atlas import (
    EMOJI_FONT_FILE,
    FONT_FOLDERS,
    TEXT_FONT_FILES,
    SpriteAtlas,
    build_atlas,
    missing_fonts,
)
from kestrel.train.scenes.textures import AtlasTensors, upload_atlas

REPOSITORY = Path(__file__).parents[1]


@lru_cache
def sprite_atlas() -> SpriteAtlas:
    """Skips the test where there is neither."""
    missing = missing_fonts()
    if not missing:
        return _built_once()
    saved = REPOSITORY / DEFAULT_ATLAS_PATH
    if saved.exists():
        return SpriteAtlas.load(saved)
    pytest.skip(f"no {', '.join(missing)} (scripts/install-fonts) and no {DEFAULT_ATLAS_PATH}")


def _built_once() -> SpriteAtlas:
    """It takes six seconds: by the first who needs it, for all workers and runs that have the same code and fonts."""
    made_of = [path for room in ("train/scenes", "images") for path in (REPOSITORY / "kestrel" / room).rglob("*.py")]
    fonts = (EMOJI_FONT_FILE, *TEXT_FONT_FILES.values())
    made_of += [path for folder in FONT_FOLDERS for name in fonts for path in folder.rglob(name)]
    digest = blake2b(f"{np.__version__} {PIL.__version__}".encode(), digest_size=16)
    for path in sorted(made_of):
        digest.update(path.read_bytes())
    shared = Path(tempfile.gettempdir()) / f"kestrel-sprites-{digest.hexdigest()}.npz"
    if not shared.exists():
        unfinished = shared.with_name(f"{os.getpid()}-{shared.name}")
        build_atlas().save(unfinished)
        unfinished.replace(shared)
    return SpriteAtlas.load(shared)


@cache
def sprite_textures(device: str) -> AtlasTensors:
    """Made once, which takes a second; nothing of them may be changed by a test."""
    return upload_atlas(sprite_atlas(), device)


def known_textures(atlas: SpriteAtlas, device: torch.device | str = "cpu") -> AtlasTensors:
    """In place of `upload_atlas`, for code that is given these sprites."""
    assert all(map(np.array_equal, atlas.sprites, sprite_atlas().sprites))
    return sprite_textures(str(device))
