"""Adapter files: reading one, and the formats with the tensor names each one needs. Pickled code is never run."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kestrel.adapters.adapter import (
    PROJ_INPUTS,
    SIDES,
    Adapter,
    AdapterFormat,
    AdapterShape,
    AdapterTarget,
    ProjInput,
    Side,
)
from kestrel.adapters.peft import NAME_PREFIX, PEFT_CONFIG, PEFT_WEIGHTS, PeftConfig, peft_adapter, read_config
from kestrel.adapters.sources.folder import weights_file
from kestrel.errors import CheckpointError

HOSTED_STATE_KEY = "lora_state_dict"


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """What a file holds, before anything is known about its format."""

    path: Path
    tensors: Mapping[str, Tensor]
    texts: Mapping[str, str]
    """Header of a safetensors file, or the plain values that stand beside a hosted fine-tune's tensors."""
    peft: PeftConfig | None = None
    """Of a folder of peft's."""


def read_adapter_file(path: Path) -> AdapterFile:
    """Reads a .safetensors, .pt or .pth file, or a folder of peft's."""
    path = weights_file(path)
    file = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    if not file.tensors:
        raise CheckpointError(f"{path} holds no tensors; download or save the adapter again")
    return _with_config(file) if _is_peft(file) else file


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


# ---------------------------------------------------------------------- the formats

OWN_FORMAT: AdapterFormat = "kestrel-adapter"
PEFT_FORMAT: AdapterFormat = "peft"
OWN_VERSION = "1"
HOSTED_PREFIXES = ("text_lora.", "_text.")

VARIANT_MATRICES: Mapping[str, str] = {
    "qkv": "mixer.Wqkv",
    "proj": "mixer.out_proj",
    "fc1": "mlp.fc1",
    "fc2": "mlp.fc2",
}
_VARIANT_MARK = ".parametrizations.weight.0."
_HOSTED_NAME = re.compile(r"(dense|moe)\.\d+\.(up|down)_[ab]")
HOSTED_MATRICES: Mapping[str, str] = {"fc1": "up", "fc2": "down"}
_METADATA_PREFIX = "metadata."
_MATRIX = re.compile("[a-z][a-z0-9_]{0,31}")

_Number = TypeVar("_Number", int, float)


class TensorRole(NamedTuple):
    """The place of one tensor in an adapter."""

    target: AdapterTarget
    side: Side


Roles = dict[str, TensorRole]


def format_of(file: AdapterFile) -> AdapterFormat:
    """Raises CheckpointError for a file in no known format."""
    if file.peft is not None:
        return PEFT_FORMAT
    if file.texts.get("format") == OWN_FORMAT:
        return OWN_FORMAT
    if any(_VARIANT_MARK in name for name in file.tensors):
        return "torch-variant"
    if any(_HOSTED_NAME.fullmatch(without_hosted_prefix(name)) for name in file.tensors):
        return "hosted-finetune"
    raise CheckpointError(
        f"{file.path} is in no known adapter format (its first tensor is {next(iter(file.tensors))}); "
        "expected a torch variant, a hosted fine-tune, a folder of peft or a file that `kestrel adapters convert` wrote"
    )


def _is_peft(file: AdapterFile) -> bool:
    if file.texts.get("format") == OWN_FORMAT:
        return False
    has_config = file.path.name == PEFT_WEIGHTS and file.path.with_name(PEFT_CONFIG).is_file()
    return has_config or any(name.startswith(NAME_PREFIX) for name in file.tensors)


def _with_config(file: AdapterFile) -> AdapterFile:
    if file.path.name != PEFT_WEIGHTS:
        raise CheckpointError(
            f"{file.path} is one of the two files of a peft adapter; keep it as {PEFT_WEIGHTS} in a folder of its own, "
            f"with its {PEFT_CONFIG}"
        )
    return replace(file, peft=read_config(file.path.with_name(PEFT_CONFIG)))


def in_own_form(file: AdapterFile, shape: AdapterShape | None = None) -> AdapterFile:
    """What a folder of peft's holds, as our own form would; with the shape of its base model, all of it is checked."""
    if file.peft is None:
        return file
    adapter = peft_adapter(file.path, file.tensors, file.peft, shape)
    tensors = {
        name: adapter.targets[target].a if side == "a" else adapter.targets[target].b
        for name, (target, side) in own_roles(adapter.targets).items()
    }
    return AdapterFile(file.path, tensors, write_header(adapter))


def variant_roles(shape: AdapterShape) -> Roles:
    """Torch variants adapt all four matrices of every layer."""
    return {
        f"text_model.transformer.h.{layer}.{module}{_VARIANT_MARK}{side.upper()}": TensorRole(
            AdapterTarget(layer, matrix), side
        )
        for layer in range(shape.num_layers)
        for matrix, module in VARIANT_MATRICES.items()
        for side in SIDES
    }


def hosted_roles(shape: AdapterShape) -> Roles:
    """Hosted fine-tunes adapt the feed-forward part of every layer, and count the layers of experts from zero."""
    num_dense = shape.num_dense_layers
    kinds = [f"dense.{layer}" if layer < num_dense else f"moe.{layer - num_dense}" for layer in range(shape.num_layers)]
    return {
        f"{kind}.{part}_{side}": TensorRole(AdapterTarget(layer, matrix), side)
        for layer, kind in enumerate(kinds)
        for matrix, part in HOSTED_MATRICES.items()
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
        target = AdapterTarget(int(layer), matrix) if layer.isdecimal() and _MATRIX.fullmatch(matrix) else None
        if target is None or target in targets:
            raise ValueError(f"header field targets has {word!r}, expected words such as 0.qkv or 3.fc1, each once")
        targets.append(target)
    return targets
