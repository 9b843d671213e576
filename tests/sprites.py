"""The sprites that tests draw scenes with: from the fonts where they are installed, else from a saved atlas."""

from __future__ import annotations

import atexit
import os
import tempfile
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

from kestrel.train.scenes.atlas import DEFAULT_ATLAS_PATH, SpriteAtlas, build_atlas, missing_fonts
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
    """By the first worker of a run that needs it, for those that come later: it takes five seconds."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        return build_atlas()
    shared = Path(tempfile.gettempdir()) / f"kestrel-sprites-{run}.npz"
    if not shared.exists():
        unfinished = shared.with_name(f"{os.getpid()}-{shared.name}")
        build_atlas().save(unfinished)
        unfinished.replace(shared)
        atexit.register(shared.unlink, missing_ok=True)
    return SpriteAtlas.load(shared)


@cache
def sprite_textures(device: str) -> AtlasTensors:
    """Made once, which takes a second; nothing of them may be changed by a test."""
    return upload_atlas(sprite_atlas(), device)


def known_textures(atlas: SpriteAtlas, device: torch.device | str = "cpu") -> AtlasTensors:
    """In place of `upload_atlas`, for code that is given these sprites."""
    assert all(map(np.array_equal, atlas.sprites, sprite_atlas().sprites))
    return sprite_textures(str(device))
