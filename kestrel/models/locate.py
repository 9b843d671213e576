"""Where one model's parts lie on this machine: weights, config and tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kestrel.errors import CheckpointError
from kestrel.models.gguf.header import is_gguf

CONFIG_NAME = "config.json"
TOKENIZER_NAME = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class LocatedModel:
    """Everything needed to load a model, without having read its weights."""

    name: str
    family: str
    config: Mapping[str, Any]
    """As config.json holds it."""
    weights: Path
    """A weights file or shard index."""
    tokenizer: Path


def require_there(path: Path) -> None:
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; check model_path")


def read_config(folder: Path) -> Mapping[str, Any] | None:
    """The config.json of a folder; None when there is none, or when it gives no dimensions.

    Published Moondreams say `"config": {}`: their dimensions are known by the name of the release only.
    """
    content = read_object(folder / CONFIG_NAME)
    if content is None:
        return None
    nested = content.get("config", content)
    return nested if isinstance(nested, dict) and _gives_sizes(nested) else None


def read_object(path: Path) -> dict[str, Any] | None:
    """What a JSON file of a model folder holds; None when there is no such file."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download or write it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object; download or write it again")
    return content


def _gives_sizes(config: Mapping[str, Any]) -> bool:
    """Whether some field is a whole number or a section."""
    return any(isinstance(value, (int, dict)) and not isinstance(value, bool) for value in config.values())


def find_tokenizer(weights: Path, given: Path | None) -> Path:
    """The tokenizer that was given, or the one beside the weights; a .gguf file holds its own."""
    if given is None and is_gguf(weights):
        return weights
    path = given or weights.parent / TOKENIZER_NAME
    if not path.is_file():
        remedy = "check tokenizer_path" if given else "put it beside the weights, or pass tokenizer_path"
        raise CheckpointError(f"{path} does not exist; {remedy}")
    return path
