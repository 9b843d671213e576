"""What an engine needs of a model, and what a family offers to the table of models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch

from kestrel.adapters import AdapterShape
from kestrel.config import RuntimeConfig
from kestrel.constraints.compiler import ConstraintCompiler
from kestrel.errors import ConfigError, EngineStopped
from kestrel.images.picture import PictureForm
from kestrel.models.checkpoint_files import Checkpoint
from kestrel.models.contract import DecoderModel, OutlineRefiner
from kestrel.models.family import LoadedModel, Progress
from kestrel.models.locate import LocatedModel
from kestrel.parallel.ranks import ALONE, Ranks
from kestrel.runtime.bring_up import ModelRuntime
from kestrel.runtime.contract import Runtime
from kestrel.runtime.device import on_device
from kestrel.runtime.memory import MemoryPlan
from kestrel.skills.base import ChatFormat, ModelProfile

MakeDecoder: TypeAlias = Callable[[Any], DecoderModel]
"""From a family's module to a decoder that may also observe what it is asked."""


class OtherProcesses(Protocol):
    """Processes without which a model cannot run."""

    def watch(self, on_end: Callable[[EngineStopped], None]) -> None:
        """Call `on_end`, from a thread, if one ends before `close`."""
        ...

    def close(self) -> None: ...


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
    others: OtherProcesses | None = None
    """Those that have the rest of the model."""


class ModelFamily(ABC):
    """A room that knows how to build its models. Stateless: one object of it is its entry in the table."""

    name: str
    kinds: tuple[str, ...]
    """What its models call themselves, for refusals of others."""
    shape_sections: tuple[str, ...] = ()
    """Sections of config.json that tell published ones apart."""
    random_names: tuple[str, ...] = ()
    """Models that can be made with random weights, for measurements of speed."""

    @abstractmethod
    def owns(self, config: Mapping[str, Any]) -> bool:
        """Whether a config.json describes a model of this family."""

    @abstractmethod
    def adapter_shape(self, config: Mapping[str, Any]) -> AdapterShape:
        """What an adapter of the model with this config.json must fit."""

    @abstractmethod
    def load(
        self,
        located: LocatedModel,
        device: torch.device | str,
        dtype: torch.dtype,
        progress: Progress | None = None,
        ranks: Ranks = ALONE,
    ) -> LoadedModel[Any, Any]:
        """The whole model, or one rank's part of it."""

    @abstractmethod
    def decoder(self, loaded: LoadedModel[Any, Any]) -> DecoderModel:
        """A model in memory behind the runtime's contract, without a runtime."""

    @abstractmethod
    def profile(self, loaded: LoadedModel[Any, Any]) -> ModelProfile:
        """What it is and can do, without constraints."""

    def chat(self, loaded: LoadedModel[Any, Any], template: Path | None, tool_parser: str | None) -> ChatFormat | None:
        """How its conversations are written; None: as the profile says. `template`: a file to take for it;
        `tool_parser`: the form in which it calls tools."""
        for name, value in (("chat_template", template), ("tool_parser", tool_parser)):
            if value is not None:
                raise ConfigError(name, f"{loaded.name} has a chat format of its own; leave it out")
        return None

    def recognise(self, checkpoint: Checkpoint) -> str | None:
        """The registered name whose weights these look like, by names and shapes."""
        return None

    def make_ready(
        self,
        loaded: LoadedModel[Any, Any],
        config: RuntimeConfig,
        with_adapters: bool = False,
        make_decoder: MakeDecoder | None = None,
    ) -> ReadyModel:
        """A runtime around a model in memory. Several may share the model, each with a KV cache of its own."""
        decoder = self.decoder(loaded) if make_decoder is None else make_decoder(loaded.model)
        if config.refiner_file is not None and decoder.regions is None:
            raise ConfigError("refiner_path", f"{loaded.name} draws no outlines that could be refined; leave it out")
        profile = self.profile(loaded)
        profile = replace(
            profile,
            chat=self.chat(loaded, config.chat_template_file, config.tool_parser) or profile.chat,
            constraints=ConstraintCompiler(loaded.tokenizer.to_json, profile.end_id),
        )
        with on_device(decoder.device):
            runtime = ModelRuntime(decoder, config, with_adapters, loaded.kv_scales)
        return ReadyModel(
            runtime=runtime,
            profile=profile,
            vocab_size=decoder.shape.vocab_size,
            num_image_positions=decoder.shape.num_image_positions,
            adapter_shape=decoder.adapter_shape,
            memory_plan=runtime.memory_plan,
            picture_form=None if decoder.vision is None else decoder.vision.picture_form(None),
        )

    def random(
        self, name: str, device: torch.device | str, dtype: torch.dtype, pieces: Iterable[str]
    ) -> LoadedModel[Any, Any]:
        """One of `random_names` in memory. Its tokenizer may have an id for each of `pieces`."""
        raise NotImplementedError(f"{self.name} has no random models")

    def write_random(self, name: str, folder: Path, pieces: Iterable[str]) -> None:
        """The same as a model folder."""
        raise NotImplementedError(f"{self.name} has no random models")
