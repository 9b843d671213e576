"""A trained model as a model folder, in the naming of published checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from kestrel.models.locate import CONFIG_NAME, TOKENIZER_NAME
from kestrel.models.weight_files import INDEX_NAME
from kestrel.moondream.model import MoondreamModel


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
