"""The tiny random models of tests/goldens and what their reference implementations computed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from kestrel.adapters import Adapter, load_adapter
from kestrel.models.adapting import SingleAdapter
from kestrel.moondream.config import MoondreamConfig, derived_generation
from kestrel.moondream.decoder import adapter_shape
from kestrel.moondream.model import MoondreamModel

from .naive import NaiveMoondream

ROOT = Path(__file__).parents[1] / "goldens"
FAMILIES = ("md2", "md3")


class GoldenTokenizer:
    def __init__(self, path: Path) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


@dataclass(frozen=True)
class Golden:
    """One family's model and expectations; nothing of it may be changed by a test."""

    config: MoondreamConfig
    model: MoondreamModel
    tokenizer: GoldenTokenizer
    naive: NaiveMoondream
    cases: dict[str, Any]
    onepass: dict[str, Any]


def config_dict(family: str) -> dict[str, Any]:
    return json.loads((ROOT / family / "config.json").read_text())


@cache
def tensors(family: str, name: str) -> dict[str, Tensor]:
    return load_file(ROOT / family / f"{name}.safetensors")


@cache
def pixels(name: str) -> np.ndarray:
    return np.asarray(Image.open(ROOT / f"image_{name}.png").convert("RGB"))


def golden(family: str, with_region_ln: bool = False) -> Golden:
    return _load(family, with_region_ln)


@cache
def _load(family: str, with_region_ln: bool) -> Golden:
    config = MoondreamConfig.from_dict(config_dict(family)).with_region_ln(with_region_ln)
    weights = dict(tensors(family, "model"))
    if with_region_ln:
        weights |= tensors(family, "region_ln")
    model = MoondreamModel(config).eval()
    model.load_state_dict({key.removeprefix("model."): value.float() for key, value in weights.items()}, strict=True)
    data = json.loads((ROOT / family / "cases.json").read_text())
    cases = data["cases"]
    tokenizer = GoldenTokenizer(ROOT / family / "tokenizer.json")
    image_cache = golden(family).naive.image_cache if with_region_ln else None  # the vision tower is the same
    naive = NaiveMoondream(model, config, tokenizer, image_cache)
    return Golden(config, model, tokenizer, naive, cases, data["onepass"])


def case_naive(family: str, case: dict[str, Any]) -> NaiveMoondream:
    """The model a case was made with: region LayerNorm, overridden ids and adapter included."""
    base = golden(family, case.get("region_layernorm", False))
    if "lora" in case:
        adapt = single_adapter(family, golden_adapter(family))
        return NaiveMoondream(base.model, base.config, base.tokenizer, base.naive.image_cache, adapt)
    overrides = case.get("tokenizer_overrides")
    if overrides is None:
        return base.naive
    ids = replace(base.config.tokenizer, **overrides)
    config = replace(base.config, tokenizer=ids, generation=derived_generation(base.config.text, ids))
    return NaiveMoondream(base.model, config, base.tokenizer, base.naive.image_cache)


@cache
def golden_adapter(family: str) -> Adapter:
    name = {"md2": "lora_variant", "md3": "lora_adapter"}[family]
    return load_adapter(ROOT / family / f"{name}.safetensors", adapter_shape(golden(family).config.text))


def single_adapter(family: str, adapter: Adapter) -> SingleAdapter:
    return SingleAdapter(adapter, adapter_shape(golden(family).config.text))


def case_names(family: str, with_adapters: bool = False) -> list[str]:
    cases = json.loads((ROOT / family / "cases.json").read_text())["cases"]
    return [name for name, case in cases.items() if with_adapters or "lora" not in case]
