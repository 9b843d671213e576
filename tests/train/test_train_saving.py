"""A saved folder loads as the model it came from, in one file or in several, and keeps nothing stale."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kestrel.models.checkpoint_files import open_checkpoint
from kestrel.moondream.config import MoondreamConfig
from kestrel.moondream.weights import load_moondream
from kestrel.train.model import save_folder
from tests.train.small_model import small_model


@pytest.mark.parametrize("shards", [1, 3])
def test_weights_come_back_in_bf16(tmp_path: Path, shards: int) -> None:
    model = small_model(seed=3)
    save_folder(model, tmp_path, "{}", shards=shards)
    with open_checkpoint(tmp_path) as checkpoint:
        loaded = load_moondream(checkpoint, model.config, torch.device("cpu"), torch.float32)
    for (name, theirs), mine in zip(loaded.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(theirs, mine.detach().bfloat16().float(), msg=name, atol=0, rtol=0)


def test_saving_again_in_another_form_leaves_only_the_new_weights(tmp_path: Path) -> None:
    save_folder(small_model(), tmp_path, "{}", shards=2)
    save_folder(small_model(), tmp_path, "{}", shards=1)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o044 == 0o044


def test_the_config_survives(tmp_path: Path) -> None:
    model = small_model()
    save_folder(model, tmp_path, "{}")
    assert MoondreamConfig.from_dict(json.loads((tmp_path / "config.json").read_text())) == model.config
