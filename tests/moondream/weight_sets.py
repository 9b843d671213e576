"""Weights of the golden models in every form a checkpoint can have, as files to load."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kestrel.models.checkpoint_files import Checkpoint, open_checkpoint
from kestrel.moondream.config import MoondreamConfig
from kestrel.moondream.model import MoondreamModel
from kestrel.moondream.weights import load_moondream

ROOT = Path(__file__).parents[1] / "goldens"


def golden_file(family: str, name: str) -> dict[str, Tensor]:
    return load_file(ROOT / family / f"{name}.safetensors")


def golden_config(family: str) -> MoondreamConfig:
    return MoondreamConfig.from_dict(json.loads((ROOT / family / "config.json").read_text()))


def key_map(family: str) -> list[dict[str, Any]]:
    return json.loads((ROOT / family / "keymap.json").read_text())


def pt_named(family: str) -> dict[str, Tensor]:
    """The golden weights under their .pt names, by the golden key map."""
    hub = golden_file(family, "model")
    return {
        entry["pt"]: hub[entry["hf"]].T.contiguous() if entry["pt_is_transposed"] else hub[entry["hf"]]
        for entry in key_map(family)
        if entry["hf"] in hub
    }


def checkpoint_of(tensors: Mapping[str, Tensor], folder: Path, suffix: str = ".safetensors") -> Checkpoint:
    if suffix == ".safetensors":
        save_file(dict(tensors), folder / "model.safetensors")
    else:
        torch.save(dict(tensors), folder / "model.pt")
    return open_checkpoint(folder)


def load(tensors: Mapping[str, Tensor], folder: Path, family: str, suffix: str = ".safetensors") -> MoondreamModel:
    with checkpoint_of(tensors, folder, suffix) as checkpoint:
        return load_moondream(checkpoint, golden_config(family), "cpu", torch.float32)


def assert_equals_golden(model: MoondreamModel, family: str) -> None:
    """Tensor for tensor."""
    golden = golden_file(family, "model")
    parameters = dict(model.named_parameters())
    assert {f"model.{name}" for name in parameters} == golden.keys()
    for name, parameter in parameters.items():
        assert torch.equal(parameter, golden[f"model.{name}"].to(parameter.dtype)), name
