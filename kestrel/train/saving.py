"""A trained model as a model folder, in the naming of published checkpoints; an adapter can be built into it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from kestrel.adapters import Adapter, AdapterTarget
from kestrel.errors import CheckpointError
from kestrel.layers.blocks import ParallelBlock
from kestrel.models.adapting import merged_delta
from kestrel.models.checkpoint_files import INDEX_NAME
from kestrel.models.locate import CONFIG_NAME, TOKENIZER_NAME
from kestrel.moondream.model import MoondreamModel
from kestrel.moondream.spec import LoadedMoondream


def save_folder(
    model: MoondreamModel, folder: Path, tokenizer_json: str, dtype: torch.dtype = torch.bfloat16, shards: int = 1
) -> None:
    """Weights in `dtype`, config and tokenizer; what the engine loads with model_path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_NAME).write_text(json.dumps(model.config.to_dict(), indent=1), encoding="utf-8")
    (folder / TOKENIZER_NAME).write_text(tokenizer_json, encoding="utf-8")
    state = {f"model.{name}": p.detach().to("cpu", dtype).contiguous() for name, p in model.named_parameters()}
    for stale in (*folder.glob("model*.safetensors"), folder / INDEX_NAME):
        stale.unlink(missing_ok=True)
    names = list(state)
    if shards == 1:
        _save(state, folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file_name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        _save({name: state[name] for name in part}, folder / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")


def _save(state: dict[str, torch.Tensor], path: Path) -> None:
    save_file(state, path)
    path.chmod(0o644)  # the library leaves it readable by its owner alone


# ---------------------------------------------------------------------- adapters built into their base model
# For programs that know no adapters, and to check that both ways agree.


@torch.no_grad()
def merge_adapter(model: MoondreamModel, adapter: Adapter) -> None:
    """Adds the adapter's deltas to the model's own matrices."""
    if adapter.proj_input == "block_norm":
        raise CheckpointError(
            "this adapter's delta of proj reads another input than proj itself and cannot be merged; serve it as it is"
        )
    for target in adapter.targets:
        weight = _matrix_of(model, target)
        weight.add_(merged_delta(adapter, target).to(weight.device, weight.dtype))


def _matrix_of(model: MoondreamModel, target: AdapterTarget) -> torch.Tensor:
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
