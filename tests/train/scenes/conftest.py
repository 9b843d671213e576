"""One atlas for all tests of this folder: from the fonts where they are installed, else a saved one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kestrel.train.scenes.atlas import DEFAULT_ATLAS_PATH, SpriteAtlas, build_atlas
from kestrel.train.scenes.fonts import missing_fonts
from kestrel.train.scenes.textures import AtlasTensors, upload_atlas

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def atlas() -> SpriteAtlas:
    torch.set_num_threads(1)
    missing = missing_fonts()
    if not missing:
        return build_atlas()
    saved = REPOSITORY / DEFAULT_ATLAS_PATH
    if saved.exists():
        return SpriteAtlas.load(saved)
    pytest.skip(f"no {', '.join(missing)} (scripts/install-fonts) and no {DEFAULT_ATLAS_PATH}")


@pytest.fixture(scope="session")
def textures(atlas: SpriteAtlas) -> AtlasTensors:
    return upload_atlas(atlas)
