"""Small random text models as folders in the hub's format."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

from kestrel.adapters import Adapter, AdapterShape, AdapterTarget, LowRankPair
from kestrel.adapters.adapter import Side

START, STOP, END_OF_TURN = 256, 257, 258
VOCAB, CONTEXT, LAYERS = 272, 256, 3
DIM, FF, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 4, 2, 16
COMMON: dict[str, Any] = {
    "hidden_size": DIM, "intermediate_size": FF, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM, "num_hidden_layers": LAYERS, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "hidden_act": "silu", "bos_token_id": START,
    "eos_token_id": [STOP, END_OF_TURN], "torch_dtype": "float32",
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False},
    "tied": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
    "biased": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": True,
        "tie_word_embeddings": False,
    },
    "mistral": {
        "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    "qwen3_moe": {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "tie_word_embeddings": False,
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [1],
    },
}  # fmt: skip
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama3": {**KINDS["llama"], "rope_scaling": {"rope_type": "llama3", **_LLAMA3}},
    "linear": {**KINDS["llama"], "rope_scaling": {"type": "linear", "factor": 4.0}},
    "yarn": {
        **KINDS["llama"],
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
    "smollm2": {
        **KINDS["tied"], "hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": None,
        "rope_theta": 100_000.0, "rope_interleaved": False,
    },
    "tinyllama": {
        **KINDS["llama"], "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": None, "rope_scaling": None,
        "pretraining_tp": 1,
    },
    "qwen3_moe over all": {
        **KINDS["qwen3_moe"], "norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": [],
        "attention_bias": True,
    },
}  # fmt: skip
"""Others that differ from a kind in a few numbers only."""
MODULES = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip


def write_folder(path: Path, kind: str, num_layers: int = LAYERS, **changes: Any) -> Path:
    """`changes` are made to its config.json. One layer is enough where nobody looks at what it says."""
    path.mkdir(parents=True)
    config = {**COMMON, **(KINDS | VARIANTS)[kind], "num_hidden_layers": num_layers}
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    (path / "tokenizer.json").write_text(tokenizer(opens=kind != "qwen2").to_str())
    save_file(_weights(config, seed=len(kind)), path / "model.safetensors", metadata={"format": "pt"})
    return path


def _sizes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    dim, heads, ff = config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]
    head_dim = config["head_dim"] or dim // heads
    q, kv = heads * head_dim, config["num_key_value_heads"] * head_dim
    return {
        "q": (q, dim), "k": (kv, dim), "v": (kv, dim), "o": (dim, q), "gate": (ff, dim), "up": (ff, dim),
        "down": (dim, ff),
    }  # fmt: skip


def layer_modules(config: dict[str, Any], layer: int) -> dict[str, tuple[int, int]]:
    """The matrices of a layer and their sizes."""
    sizes, inner, dim = _sizes(config), config.get("moe_intermediate_size"), config["hidden_size"]
    is_sparse = "num_experts" in config and (layer + 1) % config["decoder_sparse_step"] == 0
    if not is_sparse or layer in config["mlp_only_layers"]:
        return {module: sizes[name] for name, module in MODULES.items()}
    found = {MODULES[name]: sizes[name] for name in "qkvo"} | {"mlp.gate": (config["num_experts"], dim)}
    for expert in (f"mlp.experts.{number}" for number in range(config["num_experts"])):
        found |= {f"{expert}.gate_proj": (inner, dim), f"{expert}.up_proj": (inner, dim)}
        found |= {f"{expert}.down_proj": (dim, inner)}
    return found


def _weights(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    kind, dim, dice = config["model_type"], config["hidden_size"], torch.Generator().manual_seed(seed)
    biased = "qkvo" if config.get("attention_bias") else "qkv" if kind == "qwen2" else ""
    with_bias = {MODULES[name] for name in biased}
    head_dim = config["head_dim"] or dim // config["num_attention_heads"]

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=dice) * 0.2

    def vector(size: int, mean: float) -> Tensor:
        return mean + torch.randn(size, generator=dice) * 0.3

    found = {"model.embed_tokens.weight": matrix(VOCAB, dim), "model.norm.weight": vector(dim, 1.0)}
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = matrix(VOCAB, dim)
    for layer in range(config["num_hidden_layers"]):
        own = f"model.layers.{layer}"
        for module, size in layer_modules(config, layer).items():
            found[f"{own}.{module}.weight"] = matrix(*size)
            if module in with_bias:
                found[f"{own}.{module}.bias"] = vector(size[0], 0.0)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{own}.{norm}.weight"] = vector(dim, 1.0)
        for norm in ("q_norm", "k_norm") if kind.startswith("qwen3") else ():
            found[f"{own}.self_attn.{norm}.weight"] = vector(head_dim, 1.0)
    return found


def tokenizer(opens: bool) -> Tokenizer:
    """Every byte is an id. `opens`: it puts the start id before a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    found.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    names = ("<s>", "</s>", "<|eot|>")
    found.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    if opens:
        found.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", START)])  # type: ignore[assignment]
    return found


def random_adapter(shape: AdapterShape, rank: int, seed: int, matrices: Collection[str] | None = None) -> Adapter:
    """Of all matrices, or of those named."""
    dice = torch.Generator().manual_seed(seed)
    targets = [target for target in shape.targets if matrices is None or target.matrix in matrices]

    def factor(target: AdapterTarget, side: Side) -> Tensor:
        return torch.randn(shape.tensor_shape(target, side, rank), generator=dice) * 0.2

    pairs = {target: LowRankPair(factor(target, "a"), factor(target, "b")) for target in targets}
    return Adapter("kestrel-adapter", rank, pairs, alpha=2.0 * rank)
