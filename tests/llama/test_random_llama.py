"""Llamas of random weights, for measurements: as a folder they load like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kestrel.config import RuntimeConfig
from kestrel.families import load, random_model, resolve, write_random_model
from kestrel.known_models import random_names
from kestrel.llama.releases import RANDOM_NAMES


def test_a_folder_has_every_matrix_of_its_model(tmp_path: Path) -> None:
    write_random_model("Ltiny", tmp_path, [])
    loaded = load(resolve(RuntimeConfig(model_path=tmp_path)), torch.device("cpu"), torch.float32)
    made = random_model("Ltiny", "cpu", torch.float32)
    shapes = [{name: p.shape for name, p in model.model.named_parameters()} for model in (loaded, made)]
    assert shapes[0] == shapes[1]
    assert loaded.tokenizer.vocab_size == made.tokenizer.vocab_size == 512
    assert all(p.isfinite().all() for p in made.model.parameters())


@pytest.mark.parametrize("name", RANDOM_NAMES)
def test_they_are_in_the_table(name: str) -> None:
    assert name in random_names()
