"""The three file formats: which tensor names each one needs, and the part of the adapter each name stands for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

from kestrel.adapters.adapter import (
    MATRICES,
    PROJ_INPUTS,
    SIDES,
    Adapter,
    AdapterFormat,
    AdapterShape,
    AdapterTarget,
    Matrix,
    ProjInput,
    Side,
)

OWN_FORMAT: AdapterFormat = "kestrel-adapter"
OWN_VERSION = "1"
HOSTED_PREFIXES = ("text_lora.", "_text.")

_VARIANT_MATRICES: Mapping[Matrix, str] = {
    "qkv": "mixer.Wqkv",
    "proj": "mixer.out_proj",
    "fc1": "mlp.fc1",
    "fc2": "mlp.fc2",
}
_VARIANT_MARK = ".parametrizations.weight.0."
_HOSTED_NAME = re.compile(r"(dense|moe)\.\d+\.(up|down)_[ab]")
_HOSTED_MATRICES: Mapping[Matrix, str] = {"fc1": "up", "fc2": "down"}
_METADATA_PREFIX = "metadata."

_Number = TypeVar("_Number", int, float)


class TensorRole(NamedTuple):
    """The place of one tensor in an adapter."""

    target: AdapterTarget
    side: Side


Roles = dict[str, TensorRole]


def is_variant(names: Iterable[str]) -> bool:
    return any(_VARIANT_MARK in name for name in names)


def is_hosted(names: Iterable[str]) -> bool:
    return any(_HOSTED_NAME.fullmatch(without_hosted_prefix(name)) for name in names)


def variant_roles(shape: AdapterShape) -> Roles:
    """Torch variants adapt all four matrices of every layer."""
    return {
        f"text_model.transformer.h.{layer}.{module}{_VARIANT_MARK}{side.upper()}": TensorRole(
            AdapterTarget(layer, matrix), side
        )
        for layer in range(shape.num_layers)
        for matrix, module in _VARIANT_MATRICES.items()
        for side in SIDES
    }


def hosted_roles(shape: AdapterShape) -> Roles:
    """Hosted fine-tunes adapt the feed-forward part of every layer, and count the layers of experts from zero."""
    num_dense = shape.num_dense_layers
    kinds = [f"dense.{layer}" if layer < num_dense else f"moe.{layer - num_dense}" for layer in range(shape.num_layers)]
    return {
        f"{kind}.{part}_{side}": TensorRole(AdapterTarget(layer, matrix), side)
        for layer, kind in enumerate(kinds)
        for matrix, part in _HOSTED_MATRICES.items()
        for side in SIDES
    }


def without_hosted_prefix(name: str) -> str:
    for prefix in HOSTED_PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def own_roles(targets: Iterable[AdapterTarget]) -> Roles:
    """Our own form adapts the targets that its header lists."""
    return {
        f"layers.{target.layer}.{target.matrix}.{side}": TensorRole(target, side)
        for target in targets
        for side in SIDES
    }


class OwnHeader(NamedTuple):
    """What the header of our own form says beside the format's name and version."""

    rank: int
    targets: list[AdapterTarget]
    alpha: float | None
    proj_input: ProjInput
    base_model: str | None
    metadata: dict[str, str]


def write_header(adapter: Adapter) -> dict[str, str]:
    texts = {
        "format": OWN_FORMAT,
        "version": OWN_VERSION,
        "rank": str(adapter.rank),
        "targets": " ".join(f"{layer}.{matrix}" for layer, matrix in adapter.targets),
        "proj_input": adapter.proj_input,
    }
    if adapter.alpha is not None:
        texts["alpha"] = repr(adapter.alpha)
    if adapter.base_model is not None:
        texts["base_model"] = adapter.base_model
    return texts | {_METADATA_PREFIX + name: text for name, text in adapter.metadata.items()}


def parse_header(texts: Mapping[str, str]) -> OwnHeader:
    """Raises ValueError, naming the field, for a header that cannot be understood."""
    version, proj_input = texts.get("version"), texts.get("proj_input")
    if version != OWN_VERSION:
        raise ValueError(f"header field version is {version!r}, this program reads {OWN_VERSION}")
    if proj_input not in PROJ_INPUTS:
        raise ValueError(f"header field proj_input is {proj_input!r}, expected {' or '.join(PROJ_INPUTS)}")
    return OwnHeader(
        rank=_positive("rank", texts.get("rank", ""), int),
        targets=_parse_targets(texts.get("targets", "")),
        alpha=_positive("alpha", texts["alpha"], float) if "alpha" in texts else None,
        proj_input=proj_input,
        base_model=texts.get("base_model"),
        metadata={k.removeprefix(_METADATA_PREFIX): v for k, v in texts.items() if k.startswith(_METADATA_PREFIX)},
    )


def _positive(name: str, text: str, parse: Callable[[str], _Number]) -> _Number:
    try:
        value = parse(text)
    except ValueError:
        value = None
    if value is None or not 0 < value < float("inf"):
        raise ValueError(f"header field {name} is {text!r}, expected a number above 0")
    return value


def _parse_targets(text: str) -> list[AdapterTarget]:
    targets: list[AdapterTarget] = []
    for word in text.split(" "):
        layer, _, matrix = word.partition(".")
        target = AdapterTarget(int(layer), matrix) if layer.isdecimal() and matrix in MATRICES else None
        if target is None or target in targets:
            raise ValueError(f"header field targets has {word!r}, expected words such as 0.qkv or 3.fc1, each once")
        targets.append(target)
    return targets
