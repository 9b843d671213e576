"""Adapters of random numbers for the engine benchmark: every matrix of every layer, in files of our own format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from kestrel.adapters import Adapter, AdapterShape, AdapterTarget, LowRankPair, save_adapter
from kestrel.adapters.adapter import MATRICES, Side
from kestrel.bench.workloads import Ask
from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError

SPREAD = 0.01
"""Small enough that answers stay finite."""


@dataclass(frozen=True, slots=True)
class RandomAdapters:
    count: int
    rank: int

    def __post_init__(self) -> None:
        for flag, value in (("--adapters", self.count), ("--adapter-rank", self.rank)):
            if value < 1:
                raise ConfigError(flag, f"must be at least 1 (got {value})")

    @property
    def names(self) -> list[str]:
        return [f"random{number}" for number in range(self.count)]

    def configured(self, config: RuntimeConfig, folder: Path) -> RuntimeConfig:
        """With room for all of them on the device at once."""
        if config.adapter_dir is not None or config.adapter_url_template is not None:
            raise ConfigError("--adapters", "makes its own adapters; leave out adapter_dir and adapter_url_template")
        return replace(
            config,
            adapter_dir=folder,
            max_adapters=max(config.max_adapters, self.count),
            max_adapter_rank=max(config.max_adapter_rank, self.rank),
        )

    def write(self, folder: Path, shape: AdapterShape) -> None:
        for seed, name in enumerate(self.names):
            save_adapter(random_adapter(shape, self.rank, seed), folder / f"{name}.safetensors")

    def taken_in_turn(self, asks: Sequence[Ask]) -> list[Ask]:
        """The same requests, each through the next adapter."""
        return [_through(ask, self.names[number % self.count]) for number, ask in enumerate(asks)]


def random_adapter(shape: AdapterShape, rank: int, seed: int) -> Adapter:
    dice = torch.Generator().manual_seed(seed)

    def factor(target: AdapterTarget, side: Side) -> Tensor:
        return torch.empty(shape.tensor_shape(target, side, rank), dtype=torch.bfloat16).normal_(
            0, SPREAD, generator=dice
        )

    targets = [AdapterTarget(layer, matrix) for layer in range(shape.num_layers) for matrix in MATRICES]
    pairs = {target: LowRankPair(factor(target, "a"), factor(target, "b")) for target in targets}
    return Adapter("kestrel-adapter", rank, pairs)


def _through(ask: Ask, name: str) -> Ask:
    return replace(ask, fields={**ask.fields, "settings": {**ask.fields["settings"], "adapter": name}})
