"""Where a run stands, as one file: enough to go on as if it had never stopped."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kestrel.errors import ConfigError

VERSION = 1


@dataclass
class TrainingState:
    """`factors` and `optimiser` are those after `step` steps; `best` are the factors of the best look so far."""

    step: int = 0
    seconds: float = 0.0
    best_loss: float | None = None
    best_step: int = 0
    looks_since_best: int = 0
    has_ended: bool = False
    """Whether all steps are done, or training ended early because it no longer helped."""
    factors: list[Tensor] = field(default_factory=list)
    optimiser: dict[str, Any] = field(default_factory=dict)


def write_state(state: TrainingState, made_with: Mapping[str, Any], path: Path) -> None:
    """Whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        torch.save({"version": VERSION, "made_with": dict(made_with), "state": vars(state)}, partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_state(path: Path, made_with: Mapping[str, Any]) -> TrainingState:
    """Refuses a run that was started with other options, naming the first that differs."""
    if not path.is_file():
        raise ConfigError("resume", f"there is nothing to go on from at {path}; leave --resume out to start")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        stored, state = content["made_with"], TrainingState(**content["state"])
        is_known = content["version"] == VERSION
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError, ValueError, OSError) as error:
        raise ConfigError("resume", f"{path} is damaged ({error!r:.200}); give --overwrite to start anew") from error
    if not is_known:
        raise ConfigError("resume", f"{path} was written by another version; give --overwrite to start anew")
    for name, value in made_with.items():
        if stored.get(name) != value:
            raise ConfigError(
                name,
                f"is {value!r}, the run to resume has {stored.get(name)!r}; give the same, or --overwrite this run",
            )
    return state
