"""What an adapter file says about itself, without a base model to hold it against."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kestrel.adapters.adapter import AdapterFormat, Side
from kestrel.adapters.formats import (
    OWN_FORMAT,
    PEFT_FORMAT,
    AdapterFile,
    format_of,
    in_own_form,
    parse_header,
    without_hosted_prefix,
)
from kestrel.adapters.loading import value_flaw
from kestrel.errors import CheckpointError

_MATRIX_NAMES: Mapping[str, str] = {
    "mixer.Wqkv": "qkv",
    "mixer.out_proj": "proj",
    "mlp.fc1": "fc1",
    "mlp.fc2": "fc2",
    "up": "fc1",
    "down": "fc2",
}
"""Our own name of each, where a format has another."""
_OWN_NAME = re.compile(r"layers\.(\d+)\.([a-z][a-z0-9_]*)\.([ab])")
_NAMES = (
    re.compile(r"text_model\.transformer\.h\.(\d+)\.(.+)\.parametrizations\.weight\.0\.([AB])"),
    re.compile(r"((?:dense|moe)\.\d+)\.(up|down)_([ab])"),
    _OWN_NAME,
)


@dataclass(frozen=True)
class AdapterSummary:
    format: AdapterFormat
    rank: int | None
    """None where only a base model could tell: of a fine-tune whose layers all have experts."""
    num_layers: int
    matrices: tuple[str, ...]
    dtypes: tuple[str, ...]
    num_tensors: int
    num_values: int
    delta_norms: Mapping[str, float]
    """Frobenius norm of all deltas of one kind of matrix together, scale included."""
    alpha: float | None = None
    base_model: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    unusable: tuple[str, ...] = ()
    """Tensors whose values no adapter can have."""


def summarise(file: AdapterFile) -> AdapterSummary:
    """Raises CheckpointError for a file in no known format."""
    kind, file = format_of(file), in_own_form(file)
    try:
        header = parse_header(file.texts) if kind in (OWN_FORMAT, PEFT_FORMAT) else None
    except ValueError as error:
        raise CheckpointError(f"{file.path}: {error}; write the adapter again") from error
    rank = _dense_rank(file) if header is None else header.rank
    alpha = None if header is None else header.alpha
    scale = 1.0 if alpha is None or rank is None else alpha / rank
    places = list(_places(file))
    return AdapterSummary(
        format=kind,
        rank=rank,
        num_layers=len({layer for layer, _, _, _ in places}),
        matrices=tuple(dict.fromkeys(matrix for _, matrix, _, _ in places)),
        dtypes=tuple(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in file.tensors.values()})),
        num_tensors=len(file.tensors),
        num_values=sum(tensor.numel() for tensor in file.tensors.values()),
        delta_norms=_delta_norms(places, scale),
        alpha=alpha,
        base_model=None if header is None else header.base_model,
        metadata=file.texts if header is None else header.metadata,
        unusable=tuple(f"{name} {flaw}" for name, tensor in file.tensors.items() if (flaw := value_flaw(tensor))),
    )


def _places(file: AdapterFile) -> Iterator[tuple[str, str, Side, Tensor]]:
    """Layer, matrix, side and tensor of each name that means something; a name under two prefixes counts once."""
    seen: set[str] = set()
    for name, tensor in file.tensors.items():
        bare = without_hosted_prefix(name)
        found = next((match for pattern in _NAMES if (match := pattern.fullmatch(bare))), None)
        if found is None or bare in seen:
            continue
        matrix = found[2] if found.re is _OWN_NAME else _MATRIX_NAMES.get(found[2])
        if matrix is not None:
            seen.add(bare)
            yield found[1], matrix, "a" if found[3] in "aA" else "b", tensor


def _dense_rank(file: AdapterFile) -> int | None:
    """What most single matrices agree on."""
    votes = Counter(tensor.shape[0] for _, _, side, tensor in _places(file) if side == "a" and tensor.ndim == 2)
    return votes.most_common(1)[0][0] if votes else None


def _delta_norms(places: list[tuple[str, str, Side, Tensor]], scale: float) -> dict[str, float]:
    tensors: dict[tuple[str, str, Side], Tensor] = {
        (layer, matrix, side): tensor for layer, matrix, side, tensor in places if not value_flaw(tensor)
    }
    squares: dict[str, float] = {}
    for (layer, matrix, side), a in tensors.items():
        b = tensors.get((layer, matrix, "b"))
        if side == "a" and b is not None and a.ndim == b.ndim and a.ndim in (2, 3) and a.shape[-2] == b.shape[-1]:
            squares[matrix] = squares.get(matrix, 0.0) + _squared_norm(a, b)
    return {matrix: scale * square**0.5 for matrix, square in squares.items()}


def _squared_norm(a: Tensor, b: Tensor) -> float:
    """‖b·a‖² from the two small Gram matrices; the delta itself may be as large as a model's layer."""
    a, b = a.double(), b.double()
    return max(0.0, float(torch.sum((b.transpose(-1, -2) @ b) * (a @ a.transpose(-1, -2)))))
