"""All weights of one Moondream: text, vision and region. No generation."""

from __future__ import annotations

import torch
from torch import nn

from kestrel.kernels.ops import Ops
from kestrel.layers.attention import Attention, Rope
from kestrel.layers.decoder import ParallelBlock, TextDecoder
from kestrel.layers.mlp import Mlp, Moe
from kestrel.layers.norm import LayerNorm
from kestrel.models.decoder import check_widths, needs_quantising, refuse_experts_only
from kestrel.moondream.config import MoondreamConfig, TextConfig
from kestrel.moondream.region import RegionModel
from kestrel.moondream.vision import VisionModel
from kestrel.parallel.ranks import Ranks


class TextModel(TextDecoder):
    """Parallel blocks, rotary positions over a part of each head, in Moondream 3 experts and tau scales.

    Parameters carry the names of the published checkpoints.
    """

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


class MoondreamModel(nn.Module):
    """`state_dict` names equal the published ones after `model.`.

    Built under `torch.device("meta")` it takes no memory; after `load_state_dict(assign=True)` call `reset_buffers`.
    """

    def __init__(self, config: MoondreamConfig) -> None:
        super().__init__()
        self.config = config
        self.text = TextModel(config.text)
        self.vision = VisionModel(config.vision)
        self.region = RegionModel(config.region)
        self._quantization = "none"

    def split(self, ranks: Ranks) -> None:
        """Keeps one rank's part of the text model. Every rank has the whole encoder and the region's heads: with them
        comes no sum to wait for, and a picture costs less to encode than the sums of its matrices would."""
        self.text.split(ranks)

    def fuse(self, ops: Ops) -> None:
        """From now on text and vision run in few, wide operations of this bundle. A model is fused once."""
        if not self.text.is_fused:
            self.text.fuse(ops)
            self.vision.fuse(ops)

    def quantise(self, quantization: str) -> None:
        """From now on run on quantised weights, which take the place of the model's own."""
        if not needs_quantising(self._quantization, quantization):
            return
        check_quantisable(quantization, self.config, self.text.ranks.size)
        self.text.to_fp8(experts_only=quantization == "fp8-experts")
        if quantization == "fp8":
            self.vision.to_fp8()
        self._quantization = quantization

    def reset_buffers(self, device: torch.device | str) -> None:
        """Computes what no checkpoint holds (rotary tables) on `device`."""
        self.text.reset_buffers(device)


def check_quantisable(quantization: str, config: MoondreamConfig, num_ranks: int = 1) -> None:
    """Refuses a model whose matrices the float8 operations do not take."""
    text, vision = config.text, config.vision
    refuse_experts_only(quantization, has_experts=text.moe is not None)
    shared = (side // num_ranks for side in (text.dim, text.qkv_dim, text.ff_dim))
    check_widths(quantization, (text.dim, *shared, vision.enc_dim, vision.enc_ff_dim))
