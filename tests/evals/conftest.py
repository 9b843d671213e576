"""One atlas, one random model and one torch thread for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kestrel.moondream.random_models import write_random_folder
from kestrel.train.scenes.atlas import SpriteAtlas
from tests.moondream.coarse import coarse_tiny_parts
from tests.sprites import known_textures, sprite_atlas


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _textures_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kestrel.train.scenes.textures.upload_atlas", known_textures)


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
    config, tokenizer = coarse_tiny_parts()
    write_random_folder(folder, config, 0, tokenizer.to_str(), dtype=torch.float32)
    return folder
