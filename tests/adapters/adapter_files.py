"""The golden base models' sizes, and their adapter files as dictionaries to bend."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from kestrel.adapters import AdapterShape
from kestrel.moondream.config import MoondreamConfig
from kestrel.moondream.decoder import adapter_shape

GOLDENS = Path(__file__).parent.parent / "goldens"
VARIANT = GOLDENS / "md2" / "lora_variant.safetensors"
HOSTED = GOLDENS / "md3" / "lora_adapter.safetensors"


def golden_shape(model: str) -> AdapterShape:
    config = json.loads((GOLDENS / model / "config.json").read_text())
    return adapter_shape(MoondreamConfig.from_dict(config).text)


MD2 = golden_shape("md2")
MD3 = golden_shape("md3")


def variant_tensors() -> dict[str, Tensor]:
    return load_file(VARIANT)


def hosted_tensors(prefix: str = "text_lora.") -> dict[str, Tensor]:
    return {name.replace("text_lora.", prefix): tensor for name, tensor in load_file(HOSTED).items()}
