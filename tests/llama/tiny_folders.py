"""Small random text models as folders in the hub's format."""

from __future__ import annotations

import json
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
}  # fmt: skip
MODULES = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
_SIZES = {
    "q": (HEADS * HEAD_DIM, DIM), "k": (KV_HEADS * HEAD_DIM, DIM), "v": (KV_HEADS * HEAD_DIM, DIM),
    "o": (DIM, HEADS * HEAD_DIM), "gate": (FF, DIM), "up": (FF, DIM), "down": (DIM, FF),
}  # fmt: skip


def write_folder(path: Path, kind: str, **changes: Any) -> Path:
    """`changes` are made to its config.json."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({**COMMON, **KINDS[kind], **changes}))
    (path / "tokenizer.json").write_text(tokenizer(opens=kind != "qwen2").to_str())
    save_file(_weights(kind), path / "model.safetensors", metadata={"format": "pt"})
    return path


def _weights(kind: str) -> dict[str, Tensor]:
    config, dice = KINDS[kind], torch.Generator().manual_seed(len(kind))
    biased = ("q", "k", "v", "o") if config.get("attention_bias") else ("q", "k", "v") if kind == "qwen2" else ()

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=dice) * 0.2

    def vector(size: int, mean: float) -> Tensor:
        return mean + torch.randn(size, generator=dice) * 0.3

    found = {"model.embed_tokens.weight": matrix(VOCAB, DIM), "model.norm.weight": vector(DIM, 1.0)}
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = matrix(VOCAB, DIM)
    for layer in range(LAYERS):
        own = f"model.layers.{layer}"
        for name, module in MODULES.items():
            found[f"{own}.{module}.weight"] = matrix(*_SIZES[name])
            if name in biased:
                found[f"{own}.{module}.bias"] = vector(_SIZES[name][0], 0.0)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{own}.{norm}.weight"] = vector(DIM, 1.0)
        for norm in ("q_norm", "k_norm") if kind == "qwen3" else ():
            found[f"{own}.self_attn.{norm}.weight"] = vector(HEAD_DIM, 1.0)
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


def random_adapter(shape: AdapterShape, matrices: tuple[str, ...], rank: int, seed: int) -> Adapter:
    dice = torch.Generator().manual_seed(seed)
    targets = [AdapterTarget(layer, matrix) for layer in range(shape.num_layers) for matrix in matrices]

    def factor(target: AdapterTarget, side: Side) -> Tensor:
        return torch.randn(shape.tensor_shape(target, side, rank), generator=dice) * 0.2

    pairs = {target: LowRankPair(factor(target, "a"), factor(target, "b")) for target in targets}
    return Adapter("kestrel-adapter", rank, pairs, alpha=2.0 * rank)
