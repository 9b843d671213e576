"""Moondreams with random weights: folders for tests and demonstrations, and models filled where they stand.

Values depend on the seed, the parameter's name and the kind of device only, not on the order they are made in.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kestrel.models.checkpoint_files import TensorInfo
from kestrel.models.locate import CONFIG_NAME, TOKENIZER_NAME
from kestrel.models.safetensors_writing import write_safetensors
from kestrel.models.weight_files import INDEX_NAME
from kestrel.moondream.config import MoondreamConfig
from kestrel.moondream.model import MoondreamModel
from kestrel.moondream.weight_names import FOURIER_TABLES, to_pt_name
from kestrel.moondream.weights import build_on_meta, stored_dtype

_SPREAD = 0.02
_NORM_WEIGHT = re.compile(r"(.*\.)?(ln|ln1|ln2|post_ln)\.weight")


def randomise_(model: MoondreamModel, seed: int) -> MoondreamModel:
    """Fills every parameter in place: norms near one, Fourier tables of spread one, the rest of spread 0.02."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _fill_randomly(parameter, name, seed)
    return model


def random_model(config: MoondreamConfig, seed: int, device: torch.device | str, dtype: torch.dtype) -> MoondreamModel:
    """A model made straight on `device`, at most one parameter at a time beyond its own size."""
    model = build_on_meta(config)
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        values = torch.empty(parameter.shape, dtype=stored_dtype(name, dtype), device=device)
        model.get_submodule(owner).register_parameter(leaf, torch.nn.Parameter(values, requires_grad=False))
    model.reset_buffers(device)
    return randomise_(model, seed).eval()


def write_random_folder(
    path: Path,
    config: MoondreamConfig,
    seed: int,
    tokenizer_json: str,
    dtype: torch.dtype = torch.bfloat16,
    naming: Literal["hub", "pt"] = "hub",
    shards: int = 1,
) -> None:
    """A complete model folder. Hub naming gives safetensors, written tensor by tensor; pt naming gives one model.pt."""
    if naming == "pt" and shards != 1:
        raise ValueError(f"a .pt file has no shards (got shards={shards})")
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG_NAME).write_text(json.dumps(config.to_dict(), indent=1), encoding="utf-8")
    (path / TOKENIZER_NAME).write_text(tokenizer_json, encoding="utf-8")
    shapes = {name: tuple(parameter.shape) for name, parameter in build_on_meta(config).named_parameters()}
    if naming == "pt":
        named = _random_tensors(shapes, seed, dtype)
        torch.save(dict(_with_pt_name(name, values) for name, values in named), path / "model.pt")
    elif shards == 1:
        _write_hub_file(path / "model.safetensors", shapes, seed, dtype)
    else:
        _write_shards(path, shapes, seed, dtype, shards)


def _fill_randomly(values: Tensor, name: str, seed: int) -> None:
    # The CPU generator takes only 32 bits of its seed.
    generator = torch.Generator(values.device).manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    values.normal_(0.0, 1.0 if name in FOURIER_TABLES else _SPREAD, generator=generator)
    if _NORM_WEIGHT.fullmatch(name):
        values.add_(1.0)


def _random_tensors(
    shapes: Mapping[str, tuple[int, ...]], seed: int, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    for name, shape in shapes.items():
        values = torch.empty(shape, dtype=dtype)
        _fill_randomly(values, name, seed)
        yield name, values


def _with_pt_name(name: str, values: Tensor) -> tuple[str, Tensor]:
    return to_pt_name(name, values.ndim), values.T.contiguous() if name in FOURIER_TABLES else values


def _write_hub_file(path: Path, shapes: Mapping[str, tuple[int, ...]], seed: int, dtype: torch.dtype) -> None:
    infos = {f"model.{name}": TensorInfo(shape, dtype) for name, shape in shapes.items()}
    named = _random_tensors(shapes, seed, dtype)
    write_safetensors(path, infos, ((f"model.{name}", values) for name, values in named))


def _write_shards(
    path: Path, shapes: Mapping[str, tuple[int, ...]], seed: int, dtype: torch.dtype, shards: int
) -> None:
    names = list(shapes)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file_name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        _write_hub_file(path / file_name, {name: shapes[name] for name in part}, seed, dtype)
        weight_map |= {f"model.{name}": file_name for name in part}
    (path / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
