"""Random models: complete folders, the same for a seed, and activations that stay finite."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kestrel import families
from kestrel.config import RuntimeConfig
from kestrel.moondream.model import MoondreamModel
from kestrel.moondream.random_models import random_model, randomise_, write_random_folder
from tests.exhaustive import sweep

from .test_lora import own_values
from .weight_sets import ROOT, golden_config

TOKENIZER = (ROOT / "md3" / "tokenizer.json").read_text()


def loaded_parameters(folder: Path) -> dict[str, torch.Tensor]:
    loaded = families.load(families.resolve(RuntimeConfig(model_path=folder)), "cpu", torch.float32)
    return dict(loaded.model.named_parameters())


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@sweep("family", ["md2", "md3"], always=["md3"])
def test_every_naming_and_number_of_shards_gives_the_same_model(tmp_path: Path, family: str) -> None:
    config = golden_config(family).with_region_ln(family == "md3")
    write_random_folder(tmp_path / "one", config, 7, TOKENIZER)
    write_random_folder(tmp_path / "three", config, 7, TOKENIZER, shards=3)
    write_random_folder(tmp_path / "pt", config, 7, TOKENIZER, naming="pt")
    write_random_folder(tmp_path / "other", config, 8, TOKENIZER)
    assert (tmp_path / "three" / "model-00003-of-00003.safetensors").exists()
    one = loaded_parameters(tmp_path / "one")
    assert same(one, loaded_parameters(tmp_path / "three"))
    assert same(one, loaded_parameters(tmp_path / "pt"))
    assert not same(one, loaded_parameters(tmp_path / "other"))
    assert families.resolve(RuntimeConfig(model_path=tmp_path / "one")).config == config.to_dict()


def test_shards_of_a_pt_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shards=2"):
        write_random_folder(tmp_path, golden_config("md2"), 0, TOKENIZER, naming="pt", shards=2)


def test_randomise_is_deterministic_and_covers_every_parameter() -> None:
    config = golden_config("md3")
    first, second = (dict(randomise_(MoondreamModel(config), 3).state_dict()) for _ in range(2))
    assert same(first, second)
    assert not any(
        same({"": first[name]}, {"": p}) for name, p in randomise_(MoondreamModel(config), 4).state_dict().items()
    )
    for name, parameter in first.items():
        centre = 1.0 if name.endswith(("ln.weight", "ln1.weight", "ln2.weight")) else 0.0
        assert float((parameter - centre).abs().max()) < (8.0 if "features" in name else 0.2), name


@pytest.mark.parametrize("family", ["md2", "md3"])
def test_a_random_model_equals_a_randomised_one_and_computes(family: str) -> None:
    config = golden_config(family)
    model = random_model(config, 3, "cpu", torch.float32)
    assert same(dict(model.named_parameters()), dict(randomise_(MoondreamModel(config), 3).named_parameters()))
    positions = torch.arange(5)
    hidden = model.text(model.text.embed(positions), positions, own_values)
    assert bool(model.text.logits(hidden).isfinite().all())
    assert bool(model.region.decode_size(hidden).isfinite().all())


def test_a_random_model_in_half_precision_keeps_its_fourier_tables_fp32() -> None:
    model = random_model(golden_config("md2"), 0, "cpu", torch.bfloat16)
    assert model.region.coord_features.dtype == torch.float32
    assert model.text.wte.dtype == torch.bfloat16
