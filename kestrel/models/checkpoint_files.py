"""Weights files: read lazily, names, shapes and dtypes on opening, data one tensor at a time; and written likewise.

Files are mapped into memory, and mapped pages count as resident once touched. A file is therefore mapped anew after
every sixteenth of it, so that reading a whole checkpoint never holds a second copy of it.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kestrel.errors import CheckpointError
from kestrel.models.gguf.header import SUFFIX as GGUF_SUFFIX
from kestrel.models.gguf.header import GgufHeader, is_gguf
from kestrel.models.gguf.tensors import GgufTensors
from kestrel.models.locate import require_there
from kestrel.parallel.ranks import Part

SAFETENSORS_SUFFIXES = (".safetensors",)
TORCH_SUFFIXES = (".pt", ".pth")

_MAPPINGS_PER_FILE = 16
_SMALLEST_MAPPING_BYTES = 16 * 2**20
_GIT_LFS_POINTER = b"version https://git-lfs"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a file's header says about one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


class TensorFile(ABC):
    """One weights file. What `read` returns looks into the mapped file, and keeps it mapped while it lives."""

    def __init__(self, path: Path) -> None:
        _require_real_file(path)
        self.path = path
        self._mapping_bytes = max(_SMALLEST_MAPPING_BYTES, path.stat().st_size // _MAPPINGS_PER_FILE)
        self._read_bytes = 0
        self.tensors: Mapping[str, TensorInfo] = self._list()

    def read(self, name: str, part: Part | None = None) -> Tensor:
        if self._read_bytes > self._mapping_bytes:
            self.close()
        tensor = self._get(name) if part is None else self._get_part(name, part)
        self._read_bytes += tensor.numel() * tensor.itemsize
        return tensor

    def close(self) -> None:
        """Lets go of the mapping; a later `read` maps the file again."""
        self._read_bytes = 0
        self._unmap()

    @abstractmethod
    def _list(self) -> dict[str, TensorInfo]: ...

    @abstractmethod
    def _get(self, name: str) -> Tensor: ...

    def _get_part(self, name: str, part: Part) -> Tensor:
        return part.cut(self._get(name))

    @abstractmethod
    def _unmap(self) -> None: ...


class SafetensorsFile(TensorFile):
    """A .safetensors file."""

    _handle: Any = None

    def _list(self) -> dict[str, TensorInfo]:
        infos: dict[str, TensorInfo] = {}
        handle = self._mapped()
        for name in handle.keys():  # noqa: SIM118
            header = handle.get_slice(name)
            dtype = _DTYPES.get(header.get_dtype())
            if dtype is None:
                raise CheckpointError(f"{self.path}: tensor {name} has the unsupported type {header.get_dtype()}")
            infos[name] = TensorInfo(tuple(header.get_shape()), dtype)
        self._unmap()
        return infos

    def _get(self, name: str) -> Tensor:
        return self._mapped().get_tensor(name)

    def _get_part(self, name: str, part: Part) -> Tensor:
        """Nothing else of the file is read."""
        kept = self._mapped().get_slice(name)
        before = (slice(None),) * (len(self.tensors[name].shape) + part.dim)
        pieces = [kept[(*before, slice(*each))] for each in part.ranges]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=part.dim)

    def _unmap(self) -> None:
        self._handle = None

    def _mapped(self) -> Any:
        if self._handle is None:
            try:
                self._handle = safe_open(self.path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{self.path} is damaged or not a safetensors file ({error}); download or copy it again"
                ) from error
        return self._handle


class TorchFile(TensorFile):
    """A .pt file: one flat dictionary of tensors, in the zip format of torch.save. Pickled code is never run."""

    _content: dict[str, Tensor] | None = None

    def _list(self) -> dict[str, TensorInfo]:
        infos = {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in self._mapped().items()}
        self._unmap()
        return infos

    def _get(self, name: str) -> Tensor:
        return self._mapped()[name]

    def _unmap(self) -> None:
        self._content = None

    def _mapped(self) -> dict[str, Tensor]:
        if self._content is None:
            self._content = _load_torch_dictionary(self.path)
        return self._content


class GgufFile(TensorFile):
    """A .gguf file under the hub's names. It is read, not mapped; what is quantised becomes float32."""

    def _list(self) -> dict[str, TensorInfo]:
        self._content = GgufTensors(GgufHeader.read(self.path))
        return {name: TensorInfo(each.stored.shape, each.dtype) for name, each in self._content.named.items()}

    def _get(self, name: str) -> Tensor:
        return self._content.read(name)

    def _unmap(self) -> None:
        pass


class Checkpoint:
    """Tensors by name over one or more files, of which at most one is mapped at a time."""

    def __init__(self, path: Path, files: Sequence[TensorFile]) -> None:
        self.path = path
        """What messages call this checkpoint: the folder, index or file it was opened from."""
        self._file_of = {name: file for file in files for name in file.tensors}
        self._mapped: TensorFile | None = None
        self.tensors: Mapping[str, TensorInfo] = {name: file.tensors[name] for file in files for name in file.tensors}
        """In file order."""

    def read(self, name: str, part: Part | None = None) -> Tensor:
        """Data of one tensor, or of a part of it. It looks into the mapped file: copy what must outlive the loading."""
        file = self._file_of[name]
        if self._mapped is not file:
            self.close()
            self._mapped = file
        return file.read(name, part)

    def close(self) -> None:
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_tensor_file(path: Path) -> TensorFile:
    """The reader for a file, by its suffix."""
    if path.suffix in SAFETENSORS_SUFFIXES:
        return SafetensorsFile(path)
    if path.suffix in TORCH_SUFFIXES:
        return TorchFile(path)
    if is_gguf(path):
        return GgufFile(path)
    known = ", ".join((*SAFETENSORS_SUFFIXES, *TORCH_SUFFIXES, GGUF_SUFFIX))
    raise CheckpointError(f"{path} is not a weights file; supported suffixes: {known}")


def _require_real_file(path: Path) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; check the path, or download the file")
    with path.open("rb") as file:
        if file.read(len(_GIT_LFS_POINTER)) == _GIT_LFS_POINTER:
            raise CheckpointError(f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` in its folder")


def _load_torch_dictionary(path: Path) -> dict[str, Tensor]:
    if not zipfile.is_zipfile(path):
        raise CheckpointError(
            f"{path} is truncated or in the old torch format; download it again, "
            "or save it again with a recent torch.save or as safetensors"
        )
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds pickled objects other than tensors, which are never run; "
            "save a plain dictionary of tensors, or use safetensors"
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); download or copy it again") from error
    _require_flat_tensors(path, content)
    return content


def _require_flat_tensors(path: Path, content: object) -> None:
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise CheckpointError(f"{path} holds a {kind}, not a dictionary of tensors; save the model's state_dict")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            kind = type(value).__name__
            raise CheckpointError(
                f"{path} holds a {kind} under {name!r}; save one flat dictionary of tensors (the model's state_dict)"
            )


# ---------------------------------------------------------------------- a folder, a shard index or a single file


INDEX_NAME = "model.safetensors.index.json"
_PREFERRED_NAMES = ("model.safetensors", INDEX_NAME, "model.pt", "model.pth")
_MAX_LISTED = 5


def find_weights(path: Path) -> Path:
    """The weights file or shard index that `path` (a folder or a file) stands for."""
    require_there(path)
    if path.is_file():
        return path
    for name in _PREFERRED_NAMES:
        if (path / name).is_file():
            return path / name
    suffixes = (*SAFETENSORS_SUFFIXES, *TORCH_SUFFIXES, GGUF_SUFFIX)
    candidates = sorted(file for file in path.iterdir() if file.is_file() and file.suffix in suffixes)
    if len(candidates) == 1:
        return candidates[0]
    if not candidates:
        raise CheckpointError(
            f"{path} holds no weights; it needs {', '.join(_PREFERRED_NAMES)}, or one other file of such a kind "
            f"or {GGUF_SUFFIX}"
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
            raise CheckpointError(f"{index} points to {file!r}; shards must be in the same folder as the index")
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


# ---------------------------------------------------------------------- writing tensor by tensor


_TYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3"}


def write_safetensors(path: Path, infos: Mapping[str, TensorInfo], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Writes `tensors`, which come in the order of `infos` and fit it."""
    header = _header(infos)
    expected = iter(infos.items())
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for name, tensor in tensors:
            if (name, TensorInfo(tuple(tensor.shape), tensor.dtype)) != next(expected, None):
                raise ValueError(f"{name} does not come in the announced order, shape or type")
            file.write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    if next(expected, None) is not None:
        raise ValueError("fewer tensors came than were announced")


def _header(infos: Mapping[str, TensorInfo]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, info in infos.items():
        end = offset + info.num_bytes
        entries[name] = {"dtype": _TYPE_NAMES[info.dtype], "shape": info.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)
