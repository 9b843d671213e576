"""An adapter built into its base model: for programs that know no adapters, and to check that both ways agree."""

from __future__ import annotations

from pathlib import Path

import torch

from kestrel.adapters import Adapter, AdapterTarget
from kestrel.errors import CheckpointError
from kestrel.layers.blocks import ParallelBlock
from kestrel.models.adapting import merged_delta
from kestrel.moondream.model import MoondreamModel
from kestrel.moondream.spec import LoadedMoondream
from kestrel.train.saving import save_folder


@torch.no_grad()
def merge_adapter(model: MoondreamModel, adapter: Adapter) -> None:
    """Adds the adapter's deltas to the model's own matrices."""
    if adapter.proj_input == "block_norm":
        raise CheckpointError(
            "this adapter's delta of proj reads another input than proj itself and cannot be merged; serve it as it is"
        )
    for target in adapter.targets:
        weight = matrix_of(model, target)
        weight.add_(merged_delta(adapter, target).to(weight.device, weight.dtype))


def matrix_of(model: MoondreamModel, target: AdapterTarget) -> torch.Tensor:
    block = model.text.blocks[target.layer]
    assert isinstance(block, ParallelBlock)
    weights = {
        "qkv": block.attn.qkv.weight,
        "proj": block.attn.proj.weight,
        "fc1": block.mlp.fc1.weight,
        "fc2": block.mlp.fc2.weight,
    }
    return weights[target.matrix]


def save_merged(loaded: LoadedMoondream, adapter: Adapter, folder: Path) -> None:
    """A model folder in fp32 with the adapter built in. The loaded model is changed by it."""
    merge_adapter(loaded.model, adapter)
    save_folder(loaded.model, folder, loaded.tokenizer.to_json(), torch.float32)
