"""One atlas for all tests of this folder."""

from __future__ import annotations

import pytest
import torch

from kestrel.train.scenes.atlas import SpriteAtlas
from kestrel.train.scenes.textures import AtlasTensors
from tests.sprites import sprite_atlas, sprite_textures


@pytest.fixture(scope="session")
def atlas() -> SpriteAtlas:
    torch.set_num_threads(1)
    return sprite_atlas()


@pytest.fixture(scope="session")
def textures(atlas: SpriteAtlas) -> AtlasTensors:
    return sprite_textures("cpu")
