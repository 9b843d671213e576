"""The one table of families, and from a configuration to a model in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kestrel import default_model
from kestrel.adapters import AdapterShape
from kestrel.config import RuntimeConfig
from kestrel.errors import CheckpointError, ConfigError, shown
from kestrel.known_models import (
    check_source,
    find_model,
    names_repository,
    random_names,
    registered_models,
    repository_of,
)
from kestrel.llama.family import LlamaFamily
from kestrel.models.checkpoint_files import find_weights, open_checkpoint
from kestrel.models.family import LoadedModel, Progress
from kestrel.models.gguf.config import read_hub_config
from kestrel.models.gguf.header import is_gguf
from kestrel.models.locate import CONFIG_NAME, LocatedModel, find_tokenizer, read_config
from kestrel.models.published import DEFAULT_BRANCH, HubFile, ModelSpec
from kestrel.moondream.spec import MoondreamFamily
from kestrel.parallel.ranks import ALONE, Ranks
from kestrel.ready_model import MakeDecoder, ModelFamily, ReadyModel
from kestrel.runtime.bring_up import Abilities, choose_fast_path, start_ahead
from kestrel.runtime.device import choose_device, choose_dtype
from kestrel.runtime.memory import naming_memory_knobs

FAMILIES: tuple[ModelFamily, ...] = (MoondreamFamily(), LlamaFamily())


def ready_model(config: RuntimeConfig, progress: Progress | None = None, *, with_adapters: bool = False) -> ReadyModel:
    """From a configuration to a model that can run: find, load, plan its memory."""
    device = choose_device(config)
    dtype = choose_dtype(config, device)
    start_ahead(device)
    choose_fast_path(config, Abilities.of(device), dtype)  # a refusal comes before the download
    with naming_memory_knobs():
        return ready_from(load(resolve(config), device, dtype, progress), config, with_adapters)


def ready_from(
    loaded: LoadedModel[Any, Any],
    config: RuntimeConfig,
    with_adapters: bool = False,
    make_decoder: MakeDecoder | None = None,
) -> ReadyModel:
    """A runtime around a model in memory. Several may share the model, each with a KV cache of its own."""
    return find_family(loaded.family).make_ready(loaded, config, with_adapters, make_decoder)


def find_family(name: str) -> ModelFamily:
    return next(family for family in FAMILIES if family.name == name)


@dataclass(frozen=True, slots=True)
class Repository:
    """A model of the hub as its config.json describes it at one commit."""

    name: str
    family: str
    config: Mapping[str, Any]
    config_file: HubFile


def find_repository(name: str, revision: str | None = None) -> Repository:
    """Fetches config.json and nothing else, so that what cannot run is refused before its weights are fetched."""
    from kestrel.models.hub import fetch_file, resolved  # noqa: PLC0415 - the hub's library takes 0.2 s to import

    file = resolved(HubFile(repository_of(name), revision or DEFAULT_BRANCH, CONFIG_NAME))
    config = read_config(fetch_file(file).parent)
    if config is None:
        raise CheckpointError(
            f"{file} gives no dimensions; download the files, and pass them as --model-path with the registered name "
            "of their model as --model"
        )
    family = _family_of(config, str(file))
    family.adapter_shape(config)  # reads the config, and so refuses what it asks for and is not built
    return Repository(name, family.name, config, file)


def adapter_shape(model: ModelSpec | LocatedModel | Repository) -> AdapterShape:
    """What an adapter of a model must fit; weights are not read."""
    return find_family(model.family).adapter_shape(model.config)


def resolve(config: RuntimeConfig) -> LocatedModel:
    """Finds the model that a configuration asks for, fetching it if it is only named.

    A local folder's own config.json decides the dimensions; a name given with it must be of a model of those. Without
    dimensions there, the name decides; without a name, the names and shapes of the weights do. Without anything, it is
    the embedded model. A repository of the hub becomes a folder of the hub's cache.
    """
    check_source(config)
    if config.weights is None and config.model in (None, default_model.NAME):
        return replace(_on_disk(default_model.FOLDER, None, config.tokenizer_file), name=default_model.NAME)
    if config.model is not None and names_repository(config.model):
        return _in_repository(config.model, config.revision, config.tokenizer_file)
    spec = None if config.model is None else find_model(config.model)
    if config.weights is not None:
        return _on_disk(config.weights, spec, config.tokenizer_file)
    assert spec is not None
    return _on_hub(spec, config.revision, config.tokenizer_file)


def load(
    located: LocatedModel,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
) -> LoadedModel[nn.Module, object]:
    """Model, tokenizer and config in memory."""
    return find_family(located.family).load(located, device, dtype, progress, ranks)


def _on_disk(path: Path, spec: ModelSpec | None, tokenizer: Path | None) -> LocatedModel:
    try:
        weights = find_weights(path)
    except OSError as error:
        raise CheckpointError(f"{shown(str(path))} cannot be read ({error.strerror}); check model_path") from error
    config = read_hub_config(weights) if is_gguf(weights) else read_config(weights.parent)
    if config is None:
        spec = spec or _recognised(weights)
        return LocatedModel(spec.name, spec.family, spec.config, weights, find_tokenizer(weights, tokenizer))
    family = _family_of(config, str(weights.parent / CONFIG_NAME))
    if spec is not None:
        _require_same_shape(weights.parent, config, family, spec)
    own = weights.stem if is_gguf(weights) else weights.parent.resolve().name
    name = own if spec is None else spec.name
    return LocatedModel(name, family.name, config, weights, find_tokenizer(weights, tokenizer))


def _family_of(config: Mapping[str, Any], title: str) -> ModelFamily:
    """`title`: of the config.json, for the refusal."""
    family = next((family for family in FAMILIES if family.owns(config)), None)
    if family is None:
        kind = config.get("model_type")
        raise CheckpointError(
            f"{title} describes no known family of models{'' if kind is None else f' (model_type {shown(kind)})'}; "
            f"known are: {', '.join(kind for family in FAMILIES for kind in family.kinds)}"
        )
    return family


def _require_same_shape(folder: Path, config: Mapping[str, Any], family: ModelFamily, spec: ModelSpec) -> None:
    """A name given together with a folder must be the name of what is in it."""
    if family.name != spec.family:
        raise CheckpointError(
            f"{folder / 'config.json'} describes a model of the family {family.name}, and {spec.name} is of the family "
            f"{spec.family}; leave model out, or name the model that is in the folder"
        )
    for section in family.shape_sections:
        expected = spec.config.get(section, {})
        for key, value in config.get(section, {}).items():
            if expected.get(key) != value:
                raise CheckpointError(
                    f"{folder / 'config.json'} does not describe {spec.name}: {section}.{key} is {value!r}, not "
                    f"{expected.get(key)!r}; leave model out, or name the model that is in the folder"
                )


def _on_hub(spec: ModelSpec, revision: str | None, tokenizer: Path | None) -> LocatedModel:
    from kestrel.models.hub import fetch_file, fetch_weights, note_commit  # noqa: PLC0415 - as above

    if spec.source is None:
        raise CheckpointError(f"{spec.name} cannot be fetched. {spec.source_note}")
    weights = fetch_weights(_at_commit(spec.name, spec.source.weights, revision))
    if revision is not None:
        note_commit(weights, revision)
    tokenizer = fetch_file(spec.source.tokenizer) if tokenizer is None else find_tokenizer(weights, tokenizer)
    return LocatedModel(spec.name, spec.family, spec.config, weights, tokenizer)


def _in_repository(name: str, revision: str | None, tokenizer: Path | None) -> LocatedModel:
    from kestrel.models.hub import fetch_folder, note_commit  # noqa: PLC0415 - as above

    config_file = find_repository(name, revision).config_file
    folder = fetch_folder(config_file, with_tokenizer=tokenizer is None)
    note_commit(folder / CONFIG_NAME, revision or DEFAULT_BRANCH)
    return replace(_on_disk(folder, None, tokenizer), name=name)


def _at_commit(name: str, published: HubFile, revision: str | None) -> HubFile:
    if revision is not None:
        from kestrel.models.hub import resolved  # noqa: PLC0415 - as above

        return resolved(replace(published, revision=revision))
    if published.revision is None:
        raise ConfigError(
            "revision",
            f"is needed for {name}: this release knows no commit of its weights, and a branch may move; take one from "
            f"{published.page}/commits and give it with --revision",
        )
    return published


def _recognised(weights: Path) -> ModelSpec:
    with open_checkpoint(weights) as checkpoint:
        names = (family.recognise(checkpoint) for family in FAMILIES)
        name = next((name for name in names if name is not None), None)
    if name is None:
        known = ", ".join(spec.name for spec in registered_models())
        raise CheckpointError(
            f"{weights.parent} has no config.json with dimensions, and the weights look like no registered model; "
            f"pass model= (one of {known}), or add a config.json"
        )
    return find_model(name)


# ---------------------------------------------------------------------- random weights, for measurements


def random_model(
    name: str, device: torch.device | str, dtype: torch.dtype, pieces: Iterable[str] = ()
) -> LoadedModel[nn.Module, object]:
    """One of `random_names` in memory. Its tokenizer may have an id for each of `pieces`."""
    return _random_family(name).random(name, device, dtype, pieces)


def write_random_model(name: str, folder: Path, pieces: Iterable[str] = ()) -> None:
    """The same as a model folder."""
    _random_family(name).write_random(name, folder, pieces)


def _random_family(name: str) -> ModelFamily:
    family = next((family for family in FAMILIES if name in family.random_names), None)
    if family is None:
        raise ConfigError("random", f"{shown(name)} is not a random model; use one of: {', '.join(random_names())}")
    return family
