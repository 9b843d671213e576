"""One atlas, one random model and one torch thread for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kestrel.moondream.tiny_random import write_tiny_random_folder
from kestrel.train.scenes.atlas import SpriteAtlas
from tests.sprites import sprite_atlas

REPOSITORY = Path(__file__).parents[2]
GOLDENS = REPOSITORY / "tests" / "goldens"


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def atlas() -> SpriteAtlas:
    return sprite_atlas()


@pytest.fixture(scope="session")
def atlas_file(atlas: SpriteAtlas, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("atlas") / "atlas.npz"
    atlas.save(path)
    return path


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random-model")
    write_tiny_random_folder(folder)
    return folder
