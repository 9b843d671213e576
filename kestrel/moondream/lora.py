"""What an adapter of a Moondream must fit."""

from __future__ import annotations

from kestrel.adapters import AdapterShape, ExpertShape
from kestrel.moondream.config import TextConfig


def adapter_shape(text: TextConfig) -> AdapterShape:
    moe = text.moe
    experts = None
    if moe is not None:
        experts = ExpertShape(moe.start_layer, moe.num_experts, moe.experts_per_token, moe.expert_inner_dim)
    return AdapterShape(text.n_layers, text.dim, text.qkv_dim, text.ff_dim, experts)
