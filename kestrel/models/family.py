"""A model in memory, and how work reports how far it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Generic, Protocol, TypeVar

from torch import nn

from kestrel.models.contract import KvScale
from kestrel.models.tokenizer import TextTokenizer


class Progress(Protocol):
    """Called with what is being done, and the bytes done of the bytes in total; the last call has them equal."""

    def __call__(self, label: str, done_bytes: int, total_bytes: int) -> None: ...


def no_progress(label: str, done_bytes: int, total_bytes: int) -> None:
    """For callers that show nothing."""


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
