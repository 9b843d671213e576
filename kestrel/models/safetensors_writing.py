"""Writing a .safetensors file tensor by tensor, for files larger than memory should hold."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from kestrel.models.checkpoint_files import TensorInfo

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
