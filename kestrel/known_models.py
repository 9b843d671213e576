"""The table of models by name, and whether a configuration names one: without torch, the hub, or a look at weights."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from kestrel import default_model
from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError, did_you_mean, shown
from kestrel.llama import releases as llama
from kestrel.models.locate import read_config, require_there
from kestrel.models.published import ModelSpec, ShortName, is_repository
from kestrel.moondream import releases as moondream


def registered_models() -> tuple[ModelSpec, ...]:
    """The published ones whose dimensions are known here."""
    return moondream.MODELS


def short_names() -> Mapping[str, ShortName]:
    """Names that stand for repositories of the hub."""
    return {short.name: short for short in llama.SHORT_NAMES}


def random_names() -> tuple[str, ...]:
    """Models that can be made with random weights, for measurements of speed."""
    return (*moondream.RANDOM_NAMES, *llama.RANDOM_NAMES)


def embedded_model() -> ModelSpec:
    """What comes with the package; its dimensions are read from its folder."""
    config = read_config(default_model.FOLDER)
    assert config is not None
    return ModelSpec(
        name=default_model.NAME,
        family=moondream.FAMILY,
        description=default_model.DESCRIPTION,
        num_parameters=default_model.NUM_PARAMETERS,
        licence=default_model.LICENCE,
        config=config,
        source=None,
    )


def known_models() -> tuple[ModelSpec, ...]:
    """Those whose dimensions are known here, the default first."""
    return (embedded_model(), *registered_models())


def find_model(name: str) -> ModelSpec:
    if name == default_model.NAME:
        return embedded_model()
    for spec in registered_models():
        if spec.name == name:
            return spec
    known = [default_model.NAME, *(spec.name for spec in registered_models()), *short_names()]
    close = did_you_mean(name, known)
    raise ConfigError(
        "model",
        f"{name!r} is not a registered model; choose one of: {', '.join(known)}, or name a repository of the hub as "
        f"org/name{close}",
    )


def names_repository(name: str) -> bool:
    """Whether `model` means a repository of the hub: by a short name, or by its own, which has a slash."""
    return "/" in name or name in short_names()


def repository_of(name: str) -> str:
    """The repository that such a name means."""
    short = short_names().get(name)
    repo = name if short is None else short.repo
    if not is_repository(repo):
        raise ConfigError(
            "model",
            f"{shown(name)} is not the name of a repository (org/name); pass files of this machine as --model-path",
        )
    known = [spec.name for spec in registered_models() if spec.source is not None and spec.source.weights.repo == repo]
    if known:
        raise ConfigError("model", f"{name} has the registered name {' or '.join(known)}; give that name")
    return repo


def check_source(config: RuntimeConfig) -> None:
    """Refuses a model that nobody knows, and files that are not there."""
    if config.weights is None and config.model in (None, default_model.NAME) and config.revision is not None:
        raise ConfigError(
            "revision",
            f"{default_model.NAME} comes with the package; name a model of the hub as model, or leave revision out",
        )
    if config.model is not None and not names_repository(config.model):
        find_model(config.model)
    elif config.model is not None:
        if config.weights is not None:
            raise ConfigError(
                "model", "is a repository of the hub, and model_path names files; leave one of the two out"
            )
        repository_of(config.model)
    if config.weights is not None:
        with suppress(OSError):  # what else is wrong with a path is said by who opens it
            require_there(config.weights)
