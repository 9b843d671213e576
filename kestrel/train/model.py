"""The model that training knows: Moondream, its folders, and the shape and first weights of kestrel-tiny.

Training is of this family by nature: both towers learn in one objective, in which coordinates and sizes have losses of
their own. This is the one file of the room that imports the family; what another family could offer as well (decoder,
prompts, loading) comes from the table.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from kestrel.adapters import Adapter, AdapterTarget
from kestrel.errors import CheckpointError
from kestrel.layers.decoder import ParallelBlock
from kestrel.layers.mlp import Moe
from kestrel.models.adapting import merged_delta
from kestrel.models.checkpoint_files import INDEX_NAME
from kestrel.models.family import LoadedModel
from kestrel.models.locate import CONFIG_NAME, TOKENIZER_NAME
from kestrel.moondream.config import (
    MoeConfig,
    MoondreamConfig,
    RegionConfig,
    TextConfig,
    TokenizerConfig,
    VisionConfig,
    derived_generation,
)
from kestrel.moondream.model import MoondreamModel
from kestrel.moondream.weights import FAMILY


def require_moondream(name: str, family: str) -> None:
    if family != FAMILY:
        raise CheckpointError(f"{name} is not a Moondream model; only models of that family can be trained")


def moondream(loaded: LoadedModel[nn.Module, object]) -> MoondreamModel:
    require_moondream(loaded.name, loaded.family)
    assert isinstance(loaded.model, MoondreamModel)
    return loaded.model


# ---------------------------------------------------------------------- kestrel-tiny
# A Moondream 3 small enough to ship and to answer on a laptop.


def tiny_config(vocab_size: int, tokenizer: TokenizerConfig) -> MoondreamConfig:
    text = TextConfig(
        dim=256, ff_dim=1024, n_layers=6, vocab_size=vocab_size, max_context=2048, n_heads=4, n_kv_heads=4,
        prefix_attn=730, rope_theta=10_000.0, tau_attn=True,
        moe=MoeConfig(num_experts=8, start_layer=2, experts_per_token=2, expert_inner_dim=128),
    )  # fmt: skip
    vision = VisionConfig(
        enc_dim=192, enc_patch_size=14, enc_n_layers=8, enc_ff_dim=768, enc_n_heads=3, proj_out_dim=text.dim,
        crop_size=378, in_channels=3, max_crops=12, overlap_margin=4, proj_inner_dim=512,
    )  # fmt: skip
    region = RegionConfig(
        text.dim, coord_feat_dim=128, coord_out_dim=1024, size_feat_dim=128, size_out_dim=2048, has_ln=True
    )
    generation = derived_generation(text, tokenizer)
    # It was taught one right answer to each question, and to think about pictures only.
    defaults = replace(generation.defaults, temperature=0.0, max_new_tokens=256, reasoning=False)
    generation = replace(generation, defaults=defaults, picture_question="What is in the picture?")
    return MoondreamConfig(text, vision, region, tokenizer, generation)


def initialise(model: MoondreamModel, seed: int) -> MoondreamModel:
    """Fresh weights: each block starts as the identity, so that depth does not hurt early training."""
    torch.manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=module.in_features**-0.5)
            nn.init.zeros_(module.bias)
    nn.init.trunc_normal_(model.vision.pos_emb, std=0.02)
    for block in model.vision.blocks:
        nn.init.zeros_(block.attn.proj.weight)  # pyright: ignore[reportArgumentType,reportAttributeAccessIssue]
        nn.init.zeros_(block.mlp.fc2.weight)  # pyright: ignore[reportArgumentType,reportAttributeAccessIssue]
    for block in model.text.blocks:
        nn.init.zeros_(block.attn.proj.weight)  # pyright: ignore[reportArgumentType,reportAttributeAccessIssue]
        if isinstance(block.mlp, Moe):
            nn.init.trunc_normal_(block.mlp.router.weight, std=0.02)
        nn.init.zeros_(block.mlp.fc2.weight)  # pyright: ignore[reportArgumentType,reportAttributeAccessIssue]
    return model


# ---------------------------------------------------------------------- folders
# In the naming of published checkpoints.


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
