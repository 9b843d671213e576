"""The text model: parallel blocks, rotary positions over a part of each head, in Moondream 3 experts and tau scales."""

from __future__ import annotations

from kestrel.layers.attention import Attention, Rope
from kestrel.layers.decoder import ParallelBlock, TextDecoder
from kestrel.layers.mlp import Mlp, Moe
from kestrel.layers.norm import LayerNorm
from kestrel.moondream.config import TextConfig


class TextModel(TextDecoder):
    """Parameters carry the names of the published checkpoints."""

    def __init__(self, config: TextConfig) -> None:
        rope = Rope(config.max_context, config.rotary_dim, config.rope_theta)
        blocks = (_block(config, layer) for layer in range(config.n_layers))
        super().__init__(config.vocab_size, config.dim, blocks, LayerNorm(config.dim), rope, head_bias=True)


def _block(config: TextConfig, layer: int) -> ParallelBlock:
    norm = LayerNorm(config.dim)
    attention = Attention(config.dim, config.n_heads, config.n_kv_heads, config.head_dim, has_tau=config.tau_attn)
    moe = config.moe
    if moe is not None and layer >= moe.start_layer:
        mlp = Moe(config.dim, moe.expert_inner_dim, moe.num_experts, moe.experts_per_token)
    else:
        mlp = Mlp(config.dim, config.ff_dim, config.dim)
    return ParallelBlock(layer, norm, attention, mlp)
