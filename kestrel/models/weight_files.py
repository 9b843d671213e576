"""Which files hold the weights: a folder, a shard index or a single file becomes one `Checkpoint`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from kestrel.errors import CheckpointError
from kestrel.models.checkpoint_files import (
    SAFETENSORS_SUFFIXES,
    TORCH_SUFFIXES,
    Checkpoint,
    TensorFile,
    open_tensor_file,
)

INDEX_NAME = "model.safetensors.index.json"
_PREFERRED_NAMES = ("model.safetensors", INDEX_NAME, "model.pt", "model.pth")
_MAX_LISTED = 5


def find_weights(path: Path) -> Path:
    """The weights file or shard index that `path` (a folder or a file) stands for."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; check model_path")
    if path.is_file():
        return path
    for name in _PREFERRED_NAMES:
        if (path / name).is_file():
            return path / name
    suffixes = SAFETENSORS_SUFFIXES + TORCH_SUFFIXES
    candidates = sorted(file for file in path.iterdir() if file.is_file() and file.suffix in suffixes)
    if len(candidates) == 1:
        return candidates[0]
    if not candidates:
        raise CheckpointError(
            f"{path} holds no weights; it needs {', '.join(_PREFERRED_NAMES)} or one other file of that kind"
        )
    names = _listing([file.name for file in candidates])
    raise CheckpointError(f"{path} holds several weights files ({names}); pass one of them as model_path")


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a folder, shard index or weights file; reads headers only."""
    weights = find_weights(path)
    if weights.suffix == ".json":
        return Checkpoint(path, _open_shards(weights))
    return Checkpoint(path, [open_tensor_file(weights)])


def read_shard_index(index: Path) -> Mapping[str, str]:
    """File name by tensor name. Shards lie beside their index; a name that points elsewhere is refused."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        entries = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a shard index (no weight_map); download it again") from error
    if not entries:
        raise CheckpointError(f"{index} lists no tensors; download it again")
    for file in entries.values():
        if Path(file).name != file:
            raise CheckpointError(f"{index} points to {file!r}; shards must lie in the same folder as the index")
    return entries


def _open_shards(index: Path) -> list[TensorFile]:
    entries = read_shard_index(index)
    names = sorted(set(entries.values()))
    absent = [name for name in names if not (index.parent / name).is_file()]
    if absent:
        raise CheckpointError(
            f"{index.parent} lacks {_listing(absent)}, listed in {index.name}; download the folder again"
        )
    files = {name: open_tensor_file(index.parent / name) for name in names}
    _check_index(index, entries, files)
    return list(files.values())


def _check_index(index: Path, entries: Mapping[str, str], files: Mapping[str, TensorFile]) -> None:
    lost = sorted(f"{name} (in {file})" for name, file in entries.items() if name not in files[file].tensors)
    if lost:
        raise CheckpointError(f"{index} lists tensors that its files lack: {_listing(lost)}; download the folder again")
    unlisted = sorted(
        f"{name} (in {file})" for file, shard in files.items() for name in shard.tensors if entries.get(name) != file
    )
    if unlisted:
        raise CheckpointError(f"{index} does not list tensors of its files: {_listing(unlisted)}; download it again")


def _listing(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_LISTED])
    return shown if len(names) <= _MAX_LISTED else f"{shown} and {len(names) - _MAX_LISTED} more"
