"""What an engine needs of a model, and what a family offers to the table of models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from kestrel.adapters import AdapterShape
from kestrel.config import RuntimeConfig
from kestrel.images.shrink import PictureForm
from kestrel.models.checkpoint_files import Checkpoint
from kestrel.models.contract import DecoderModel, OutlineRefiner
from kestrel.models.family import LoadedModel, ModelSpec, Progress
from kestrel.models.locate import LocatedModel
from kestrel.runtime.contract import Runtime
from kestrel.runtime.memory import MemoryPlan
from kestrel.skills.base import ModelProfile

MakeDecoder: TypeAlias = Callable[[Any], DecoderModel]
"""From a family's module to a decoder that may also observe what it is asked."""


@dataclass(frozen=True)
class ReadyModel:
    """A model on its device with a runtime around it: what an engine needs."""

    runtime: Runtime[Any]
    profile: ModelProfile
    vocab_size: int
    num_image_positions: int
    """Positions a picture takes in the context; 0 when the model reads text only."""
    adapter_shape: AdapterShape
    """What an adapter of it must fit."""
    memory_plan: MemoryPlan | None = None
    """What the memory of its device is for."""
    picture_form: PictureForm | None = None
    """What of a picture is handed to the runtime; all its pixels where it is not given."""
    refiner: OutlineRefiner | None = None
    """Sharpens the outlines of `segment`, when its weights were given."""
    computes_apart: bool = False
    """The runtime is in another process."""


class ModelFamily(Protocol):
    """A room that knows how to build its models."""

    @property
    def name(self) -> str: ...

    @property
    def models(self) -> tuple[ModelSpec, ...]: ...

    def owns(self, config: Mapping[str, Any]) -> bool:
        """Whether a config.json describes a model of this family."""
        ...

    def recognise(self, checkpoint: Checkpoint) -> str | None:
        """The registered name whose weights these look like, by names and shapes."""
        ...

    def adapter_shape(self, config: Mapping[str, Any]) -> AdapterShape:
        """What an adapter of the model with this config.json must fit."""
        ...

    def load(
        self, located: LocatedModel, device: torch.device | str, dtype: torch.dtype, progress: Progress | None = None
    ) -> LoadedModel[nn.Module, object]: ...

    def make_ready(
        self,
        loaded: LoadedModel[Any, Any],
        config: RuntimeConfig,
        with_adapters: bool = False,
        make_decoder: MakeDecoder | None = None,
    ) -> ReadyModel:
        """A runtime around a model in memory. Several may share the model, each with a KV cache of its own."""
        ...

    def decoder(self, loaded: LoadedModel[Any, Any]) -> DecoderModel:
        """A model in memory behind the runtime's contract, without a runtime."""
        ...

    def profile(self, loaded: LoadedModel[Any, Any]) -> ModelProfile:
        """Its prompts and control ids, without constraints."""
        ...

    @property
    def random_names(self) -> tuple[str, ...]:
        """Models that can be made with random weights, for measurements of speed."""
        ...

    def random(
        self, name: str, device: torch.device | str, dtype: torch.dtype, pieces: Iterable[str]
    ) -> LoadedModel[nn.Module, object]:
        """One of `random_names` in memory. Its tokenizer may have an id for each of `pieces`."""
        ...

    def write_random(self, name: str, folder: Path, pieces: Iterable[str]) -> None:
        """The same as a model folder."""
        ...
