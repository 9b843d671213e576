"""Adapter files for the golden models: every matrix of every layer, deltas large enough to change answers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from kestrel.adapters import Adapter, AdapterTarget, LowRankPair, save_adapter
from kestrel.adapters.adapter import Side
from kestrel.moondream.config import MoondreamConfig
from kestrel.moondream.decoder import adapter_shape
from tests.engine.conftest import GOLDENS


def random_adapter(family: str, rank: int, seed: int, size: float = 0.15) -> Adapter:
    config = MoondreamConfig.from_dict(json.loads((GOLDENS / family / "config.json").read_text()))
    shape = adapter_shape(config.text)
    dice = torch.Generator().manual_seed(seed)

    def factor(target: AdapterTarget, side: Side) -> Tensor:
        return torch.randn(shape.tensor_shape(target, side, rank), generator=dice) * size

    pairs = {target: LowRankPair(factor(target, "a"), factor(target, "b")) for target in shape.targets}
    return Adapter("kestrel-adapter", rank, pairs)


def write_adapters(folder: Path, family: str, num_adapters: int) -> list[str]:
    """`a0`, `a1` … of ranks 6, 12, 18, 24 in turn; their names."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"a{number}" for number in range(num_adapters)]
    for number, name in enumerate(names):
        save_adapter(random_adapter(family, 6 * (1 + number % 4), seed=number), folder / f"{name}.safetensors")
    return names
