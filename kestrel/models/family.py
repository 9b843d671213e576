"""What a family of models offers to the table of models: its releases, and how to recognise and load one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn

from kestrel.adapters import AdapterShape
from kestrel.models.checkpoint_files import Checkpoint
from kestrel.models.hub import HubSource
from kestrel.models.locate import LocatedModel
from kestrel.models.progress import Progress
from kestrel.models.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One published model."""

    name: str
    family: str
    description: str
    num_parameters: int
    licence: str
    config: Mapping[str, Any]
    """As config.json would hold it."""
    source: HubSource | None
    """None: its weights are not on the hub in a form this engine reads; `source_note` says what to do."""
    source_note: str = ""
    """What is not certain about the source."""


ModelT = TypeVar("ModelT", bound=nn.Module, covariant=True)
ConfigT = TypeVar("ConfigT", covariant=True)


@dataclass(frozen=True)
class LoadedModel(Generic[ModelT, ConfigT]):
    """A model in memory. `config` is the one that was loaded: parts that only the weights decide are filled in."""

    name: str
    model: ModelT
    config: ConfigT
    tokenizer: TextTokenizer


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
