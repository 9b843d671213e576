"""The golden base models' sizes, and their adapter files as dictionaries to bend."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from kestrel.adapters import AdapterShape, ExpertShape

GOLDENS = Path(__file__).parent.parent / "goldens"
VARIANT = GOLDENS / "md2" / "lora_variant.safetensors"
HOSTED = GOLDENS / "md3" / "lora_adapter.safetensors"


def golden_shape(model: str) -> AdapterShape:
    text = json.loads((GOLDENS / model / "config.json").read_text())["text"]
    head_dim = text["dim"] // text["n_heads"]
    return AdapterShape(
        num_layers=text["n_layers"],
        dim=text["dim"],
        qkv_dim=head_dim * (text["n_heads"] + 2 * text["n_kv_heads"]),
        ff_dim=text["ff_dim"],
        moe=ExpertShape(**text["moe"]) if "moe" in text else None,
    )


MD2 = golden_shape("md2")
MD3 = golden_shape("md3")


def variant_tensors() -> dict[str, Tensor]:
    return load_file(VARIANT)


def hosted_tensors(prefix: str = "text_lora.") -> dict[str, Tensor]:
    return {name.replace("text_lora.", prefix): tensor for name, tensor in load_file(HOSTED).items()}
