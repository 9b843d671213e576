"""Reading adapter files: names to tensors, and the texts beside them. Pickled code is never run."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kestrel.errors import CheckpointError

HOSTED_STATE_KEY = "lora_state_dict"


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """What a file holds, before anything is known about its format."""

    path: Path
    tensors: Mapping[str, Tensor]
    texts: Mapping[str, str]
    """Header of a safetensors file, or the plain values that stand beside a hosted fine-tune's tensors."""


def read_adapter_file(path: Path) -> AdapterFile:
    """Reads a .safetensors, .pt or .pth file."""
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file; check the path of the adapter")
    if path.stat().st_size == 0:
        raise CheckpointError(f"{path} is empty; download or copy the adapter again")
    if path.suffix == ".safetensors":
        file = _read_safetensors(path)
    elif path.suffix in (".pt", ".pth"):
        file = _read_torch(path)
    else:
        raise CheckpointError(f"{path} is not an adapter file; supported suffixes: .safetensors, .pt, .pth")
    if not file.tensors:
        raise CheckpointError(f"{path} holds no tensors; download or save the adapter again")
    return file


def _read_safetensors(path: Path) -> AdapterFile:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return AdapterFile(path, tensors, file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is damaged or not a safetensors file ({error}); download or copy it again"
        ) from error


def _read_torch(path: Path) -> AdapterFile:
    content = _load_without_code(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a dictionary of tensors")
    texts: dict[str, str] = {}
    if HOSTED_STATE_KEY in content:
        texts = {str(k): str(v) for k, v in content.items() if isinstance(v, str | int | float)}
        content = content[HOSTED_STATE_KEY]
        if not isinstance(content, dict):
            kind = type(content).__name__
            raise CheckpointError(f"{path} holds a {kind} under {HOSTED_STATE_KEY}, not a dictionary of tensors")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(
                f"{path} holds a {type(value).__name__} under {name!r}; save one flat dictionary of tensors"
            )
    return AdapterFile(path, content, texts)


def _load_without_code(path: Path) -> object:
    if not zipfile.is_zipfile(path):
        raise CheckpointError(
            f"{path} is truncated or in the old torch format; download it again, "
            "or save it again with a recent torch.save or as safetensors"
        )
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is damaged or holds pickled objects other than tensors, which are never run; "
            "save a plain dictionary of tensors, or use safetensors"
        ) from error
    except Exception as error:  # A damaged pickle can raise anything.
        raise CheckpointError(f"{path} is damaged ({error!r}); download or copy it again") from error
