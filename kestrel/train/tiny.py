"""The shape of kestrel-tiny: a Moondream 3 small enough to ship in the package and to answer on a laptop."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from kestrel.layers.mlp import Moe
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

NAME = "kestrel-tiny"


def tiny_config(vocab_size: int, tokenizer: TokenizerConfig) -> MoondreamConfig:
    text = TextConfig(
        dim=256,
        ff_dim=1024,
        n_layers=6,
        vocab_size=vocab_size,
        max_context=2048,
        n_heads=4,
        n_kv_heads=4,
        prefix_attn=730,
        rope_theta=10_000.0,
        tau_attn=True,
        moe=MoeConfig(num_experts=8, start_layer=2, experts_per_token=2, expert_inner_dim=128),
    )
    vision = VisionConfig(
        enc_dim=192,
        enc_patch_size=14,
        enc_n_layers=8,
        enc_ff_dim=768,
        enc_n_heads=3,
        proj_out_dim=text.dim,
        crop_size=378,
        in_channels=3,
        max_crops=12,
        overlap_margin=4,
        proj_inner_dim=512,
    )
    region = RegionConfig(
        text.dim, coord_feat_dim=128, coord_out_dim=1024, size_feat_dim=128, size_out_dim=2048, has_ln=True
    )
    generation = derived_generation(text, tokenizer)
    # It was taught one right answer to each question, and to think about pictures only.
    defaults = replace(generation.defaults, temperature=0.0, max_new_tokens=256, reasoning=False)
    return MoondreamConfig(text, vision, region, tokenizer, replace(generation, defaults=defaults))


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
