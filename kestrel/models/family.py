"""A published model, one in memory, and how work reports how far it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from torch import nn

from kestrel.models.contract import KvScale
from kestrel.models.hub import HubSource
from kestrel.models.tokenizer import TextTokenizer


class Progress(Protocol):
    """Called with what is being done, and the bytes done of the bytes in total; the last call has them equal."""

    def __call__(self, label: str, done_bytes: int, total_bytes: int) -> None: ...


def no_progress(label: str, done_bytes: int, total_bytes: int) -> None:
    """For callers that show nothing."""


# ---------------------------------------------------------------------- models


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


@dataclass(frozen=True, slots=True)
class ShortName:
    """Another name for a repository of the hub, which is fetched as by its own: main as it is now, or a revision."""

    name: str
    repo: str
    num_parameters: int
    licence: str
    description: str


ModelT = TypeVar("ModelT", bound=nn.Module, covariant=True)
ConfigT = TypeVar("ConfigT", covariant=True)


@dataclass(frozen=True)
class LoadedModel(Generic[ModelT, ConfigT]):
    """A model in memory. `config` is the one that was loaded: parts that only the weights decide are filled in."""

    family: ClassVar[str]
    """Name of its entry in the table of families."""
    name: str
    model: ModelT
    config: ConfigT
    tokenizer: TextTokenizer
    kv_scales: Mapping[int, KvScale] = field(default_factory=dict)
    """Scales for a float8 KV cache by layer, if the checkpoint has them. The loaded weights do not depend on them."""
