"""The decoder: sequential blocks of shared layers, and where its matrices are in a checkpoint of the hub."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

from kestrel.adapters import AdaptedMatrix, AdapterShape, ExpertShape
from kestrel.layers.attention import Attention, Rope
from kestrel.layers.decoder import SequentialBlock, TextDecoder
from kestrel.layers.mlp import GatedMlp, Moe
from kestrel.layers.norm import RmsNorm
from kestrel.llama.config import LlamaConfig
from kestrel.models.checkpoint_files import Checkpoint, TensorInfo
from kestrel.models.contract import DecoderShape
from kestrel.models.family import Progress, no_progress
from kestrel.models.strict_loading import (
    LoadPlan,
    Source,
    check_plan,
    copy_stacked,
    load_parameters,
    plain_source,
)
from kestrel.parallel.ranks import ALONE, Ranks, refuse_uneven

_OUTER = {"wte": "model.embed_tokens.weight", "post_ln.weight": "model.norm.weight", "lm_head.weight": "lm_head.weight"}
_LAYER = re.compile(r"blocks\.(\d+)\.(.+)\.(weight|bias)")
_PARTS = {
    "ln1": ("input_layernorm",),
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.q_norm": ("self_attn.q_norm",),
    "attn.k_norm": ("self_attn.k_norm",),
    "attn.proj": ("self_attn.o_proj",),
    "ln2": ("post_attention_layernorm",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
    "mlp.router": ("mlp.gate",),
}
"""What the checkpoint's modules make of a module here: their tensors lie one above the other."""
_EXPERT_PARTS = {"mlp.fc1": ("gate_proj", "up_proj"), "mlp.fc2": ("down_proj",)}
"""The same for each expert."""
_COMPUTED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Tables that old checkpoints hold and everybody computes."""


class LlamaModel(TextDecoder):
    def __init__(self, config: LlamaConfig) -> None:
        rope = Rope(config.max_context, config.head_dim, config.rope_theta, config.rope_scaling)
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
    return SequentialBlock(layer, norms[0], attention, norms[1], _mlp(config, layer))


def _mlp(config: LlamaConfig, layer: int) -> GatedMlp | Moe:
    experts = config.experts
    if experts is None or layer not in experts.layers:
        return GatedMlp(config.dim, config.ff_dim)
    return Moe(
        config.dim,
        experts.inner_dim,
        experts.num_experts,
        experts.experts_per_token,
        gate="silu",
        weights_over_all=experts.weights_over_all,
        router_bias=False,
    )


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
    attention = {
        "q": AdaptedMatrix(q_dim, dim, "qkv"),
        "k": AdaptedMatrix(kv_dim, dim, "qkv", first_row=q_dim),
        "v": AdaptedMatrix(kv_dim, dim, "qkv", first_row=q_dim + kv_dim),
        "o": AdaptedMatrix(dim, q_dim, "proj"),
    }
    dense = attention | {
        "gate": AdaptedMatrix(ff_dim, dim, "gate_up"),
        "up": AdaptedMatrix(ff_dim, dim, "gate_up", first_row=ff_dim),
        "down": AdaptedMatrix(dim, ff_dim, "down"),
    }
    experts = config.experts
    if experts is None:
        return AdapterShape((dense,) * config.n_layers)
    count, inner_dim = experts.num_experts, experts.inner_dim
    sparse = attention | {
        "router": AdaptedMatrix(count, dim, "router"),
        "gate_up": AdaptedMatrix(2 * inner_dim, dim, "fc1", experts=ExpertShape(count, joined=2)),
        "down": AdaptedMatrix(dim, inner_dim, "fc2", experts=ExpertShape(count)),
    }
    return AdapterShape(tuple(sparse if layer in experts.layers else dense for layer in range(config.n_layers)))


# ---------------------------------------------------------------------- weights


def load_llama(
    checkpoint: Checkpoint,
    config: LlamaConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
) -> LlamaModel:
    _check_ranks(config, ranks)
    with torch.device("meta"):
        model = LlamaModel(config)
    model.split(ranks)
    plan = plan_load(checkpoint.tensors, model)
    check_plan(plan, model, str(checkpoint.path))
    load_parameters(model, checkpoint, plan, torch.device(device), lambda _: dtype, progress or no_progress)
    model.reset_buffers(device)
    return model.eval()


def _check_ranks(config: LlamaConfig, ranks: Ranks) -> None:
    counts, experts = {"num_attention_heads": config.n_heads}, config.experts
    if experts is None or len(experts.layers) < config.n_layers:
        counts["intermediate_size"] = config.ff_dim
    if experts is not None:
        counts["moe_intermediate_size"] = experts.inner_dim
    refuse_uneven(ranks.size, counts, {"num_key_value_heads": config.n_kv_heads})


def plan_load(tensors: Mapping[str, TensorInfo], model: LlamaModel) -> LoadPlan:
    """A source for every parameter that the headers offer, and what is left over."""
    problems: list[str] = []
    sources: dict[str, Source] = {}
    unused = dict.fromkeys(name for name in tensors if _COMPUTED.fullmatch(name) is None)
    for parameter, value in model.named_parameters():
        names = _tensors_of(parameter, model.config)
        if all(name in tensors for name in names):
            each = [plain_source(name, tensors[name], problems) for name in names]
            sources[parameter] = _stacked(each, len(value) if value.ndim == 3 else None, problems)
        for name in names:
            unused.pop(name, None)
    if model.config.is_tied:
        unused.pop(_OUTER["lm_head.weight"], None)
    return LoadPlan(sources, list(unused), problems)


def _tensors_of(parameter: str, config: LlamaConfig) -> list[str]:
    """The checkpoint's names of what a parameter is made of, in order."""
    if parameter in _OUTER:
        return [_OUTER[parameter]]
    found = _LAYER.fullmatch(parameter)
    assert found is not None, parameter
    layer, module, leaf = found.groups()
    if module in _EXPERT_PARTS:
        assert config.experts is not None
        experts = [f"mlp.experts.{expert}" for expert in range(config.experts.num_experts)]
        parts = [f"{expert}.{part}" for expert in experts for part in _EXPERT_PARTS[module]]
    else:
        parts = list(_PARTS[module])
    return [f"model.layers.{layer}.{part}.{leaf}" for part in parts]


def _stacked(each: Sequence[Source], num_experts: int | None, problems: list[str]) -> Source:
    """The tensors one above the other, expert by expert where there are some."""
    if len(each) == 1 and num_experts is None:
        return each[0]
    size = len(each) // (num_experts or 1)
    shapes = {tuple(source.shape for source in each[start : start + size]) for start in range(0, len(each), size)}
    if len(shapes) > 1 or len({source.shape[1:] for source in each}) > 1 or not each[0].shape:
        problems.append(f"{each[0].names[0]} and the tensors that belong to it do not fit each other")
    shape = (sum(sum(source.shape[:1]) for source in each[:size]), *each[0].shape[1:])
    names = tuple(source.names[0] for source in each)
    return Source(names, shape if num_experts is None else (num_experts, *shape), copy_stacked)
