"""The decoder: sequential blocks of shared layers, and where its matrices are in a checkpoint of the hub."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kestrel.adapters import AdaptedMatrix, AdapterShape
from kestrel.layers.attention import Attention, Rope
from kestrel.layers.decoder import SequentialBlock, TextDecoder
from kestrel.layers.mlp import GatedMlp
from kestrel.layers.norm import RmsNorm
from kestrel.llama.config import LlamaConfig
from kestrel.models.checkpoint_files import Checkpoint, TensorInfo
from kestrel.models.contract import DecoderShape
from kestrel.models.family import Progress, no_progress
from kestrel.models.strict_loading import LoadPlan, Source, check_plan, load_parameters, plain_source

_OUTER = {"model.embed_tokens.weight": "wte", "model.norm.weight": "post_ln.weight", "lm_head.weight": "lm_head.weight"}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_MODULES = {
    "input_layernorm": "ln1",
    "post_attention_layernorm": "ln2",
    "self_attn.o_proj": "attn.proj",
    "self_attn.q_norm": "attn.q_norm",
    "self_attn.k_norm": "attn.k_norm",
    "mlp.down_proj": "mlp.down",
}
_JOINED = {
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Matrices that lie one above the other here."""
_COMPUTED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Tables that old checkpoints hold and everybody computes."""


class LlamaModel(TextDecoder):
    def __init__(self, config: LlamaConfig) -> None:
        rope = Rope(config.max_context, config.head_dim, config.rope_theta)
        blocks = (_block(config, layer) for layer in range(config.n_layers))
        norm = RmsNorm(config.dim, config.norm_eps)
        super().__init__(config.vocab_size, config.dim, blocks, norm, rope, is_tied=config.is_tied)
        self.config = config


def _block(config: LlamaConfig, layer: int) -> SequentialBlock:
    attention = Attention(
        config.dim,
        config.n_heads,
        config.n_kv_heads,
        config.head_dim,
        qkv_bias=config.qkv_bias,
        proj_bias=config.proj_bias,
        qk_norm_eps=config.norm_eps if config.has_qk_norm else None,
    )
    norms = [RmsNorm(config.dim, config.norm_eps) for _ in range(2)]
    return SequentialBlock(layer, norms[0], attention, norms[1], GatedMlp(config.dim, config.ff_dim))


def decoder_shape(config: LlamaConfig) -> DecoderShape:
    return DecoderShape(
        num_layers=config.n_layers,
        num_kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        hidden_dim=config.dim,
        vocab_size=config.vocab_size,
        max_context=config.max_context,
    )


def adapter_shape(config: LlamaConfig) -> AdapterShape:
    dim, q_dim, kv_dim, ff_dim = config.dim, config.q_dim, config.kv_dim, config.ff_dim
    return AdapterShape(
        config.n_layers,
        {
            "q": AdaptedMatrix(q_dim, dim, "qkv"),
            "k": AdaptedMatrix(kv_dim, dim, "qkv", first_row=q_dim),
            "v": AdaptedMatrix(kv_dim, dim, "qkv", first_row=q_dim + kv_dim),
            "o": AdaptedMatrix(dim, q_dim, "proj"),
            "gate": AdaptedMatrix(ff_dim, dim, "gate_up"),
            "up": AdaptedMatrix(ff_dim, dim, "gate_up", first_row=ff_dim),
            "down": AdaptedMatrix(dim, ff_dim, "down"),
        },
    )


# ---------------------------------------------------------------------- weights


def load_llama(
    checkpoint: Checkpoint,
    config: LlamaConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> LlamaModel:
    with torch.device("meta"):
        model = LlamaModel(config)
    plan = plan_load(checkpoint.tensors, model)
    check_plan(plan, model, str(checkpoint.path))
    load_parameters(model, checkpoint, plan, torch.device(device), lambda _: dtype, progress or no_progress)
    model.reset_buffers(device)
    return model.eval()


def plan_load(tensors: Mapping[str, TensorInfo], model: LlamaModel) -> LoadPlan:
    """A source for every parameter that the headers offer, and what is left over."""
    problems: list[str] = []
    sources: dict[str, Source] = {}
    unexpected: list[str] = []
    parts = {part: name for name, names in _JOINED.items() for part in names}
    for name, info in tensors.items():
        found = _LAYER.fullmatch(name)
        if found is None or found[2] not in {**_MODULES, **parts}:
            own = _OUTER.get(name)
            is_twin = own == "lm_head.weight" and model.config.is_tied
            if own is not None and not is_twin:
                sources[own] = plain_source(name, info, problems)
            elif not is_twin and _COMPUTED.fullmatch(name) is None:
                unexpected.append(name)
        elif found[2] in _MODULES:
            sources[f"blocks.{found[1]}.{_MODULES[found[2]]}.{found[3]}"] = plain_source(name, info, problems)
        else:
            joined = parts[found[2]]
            names = [f"model.layers.{found[1]}.{part}.{found[3]}" for part in _JOINED[joined]]
            target = f"blocks.{found[1]}.{joined}.{found[3]}"
            if target not in sources and all(part in tensors for part in names):
                each = [plain_source(part, tensors[part], problems) for part in names]
                rows = sum(source.shape[0] for source in each)
                sources[target] = Source(tuple(names), (rows, *each[0].shape[1:]), _copy_stacked)
    return LoadPlan(sources, unexpected, problems)


def _copy_stacked(target: Tensor, tensors: Sequence[Tensor]) -> None:
    for own, given in zip(target.split([len(one) for one in tensors]), tensors, strict=True):
        own.copy_(given)
