"""Folders as peft's save_pretrained writes them, for the tiny text models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kestrel.llama.config import LlamaConfig
from kestrel.llama.model import adapter_shape
from tests.llama.tiny_folders import COMMON, KINDS, LAYERS, MODULES, layer_modules

CONFIG: dict[str, Any] = {
    "alpha_pattern": {}, "auto_mapping": None, "base_model_name_or_path": "someone/tiny", "bias": "none",
    "corda_config": None, "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
    "init_lora_weights": True, "layer_replication": None, "layers_pattern": None, "layers_to_transform": None,
    "loftq_config": {}, "lora_alpha": 8, "lora_bias": False, "lora_dropout": 0.05, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": None, "peft_type": "LORA", "peft_version": "0.17.0",
    "qalora_group_size": 16, "r": 4, "rank_pattern": {}, "revision": None, "target_modules": ["q_proj", "v_proj"],
    "target_parameters": None, "task_type": "CAUSAL_LM", "trainable_token_indices": None, "use_dora": False,
    "use_qalora": False, "use_rslora": False,
}  # fmt: skip
LLAMA, MOE = (adapter_shape(LlamaConfig.from_dict({**COMMON, **KINDS[kind]})) for kind in ("llama", "qwen3_moe"))
NAMES = {module.rpartition(".")[2]: (matrix, module) for matrix, module in MODULES.items()}
"""Our name and the whole name in a layer, by the end of it."""


def peft_tensors(
    modules: Sequence[str], rank: int = 4, seed: int = 0, kind: str = "llama", **ranks: int
) -> dict[str, Tensor]:
    """Of modules whose names end so, in every layer; `ranks` of some, by the end of their names."""
    dice = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for layer in range(LAYERS):
        for module, (rows, columns) in layer_modules({**COMMON, **KINDS[kind]}, layer).items():
            own, end = f"base_model.model.model.layers.{layer}.{module}", module.rpartition(".")[2]
            if end in modules:
                found[f"{own}.lora_A.weight"] = torch.randn(ranks.get(end, rank), columns, generator=dice) * 0.3
                found[f"{own}.lora_B.weight"] = torch.randn(rows, ranks.get(end, rank), generator=dice) * 0.3
    return found


def fused_tensors(rank: int, seed: int = 0) -> dict[str, Tensor]:
    """Of the experts as parameters, `gate_up_proj` with twice the rank."""
    dice = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for layer, matrices in enumerate(MOE.layers):
        for matrix, wrappers in (("gate_up", "experts.base_layer"), ("down", "experts")):
            if (experts := matrices[matrix].experts if matrix in matrices else None) is not None:
                total, own = experts.num_experts * experts.rank(rank), f"base_model.model.model.layers.{layer}.mlp"
                a, b = torch.randn(total, matrices[matrix].columns), torch.randn(matrices[matrix].rows, total)
                found[f"{own}.{wrappers}.lora_A.weight"] = a.normal_(0, 0.3, generator=dice)
                found[f"{own}.{wrappers}.lora_B.weight"] = b.normal_(0, 0.3, generator=dice)
    return found


def write_peft(folder: Path, tensors: Mapping[str, Tensor] | None = None, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    config = {**CONFIG, **changes}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))
    save_file(
        dict(tensors or peft_tensors(CONFIG["target_modules"])),
        folder / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    return folder
