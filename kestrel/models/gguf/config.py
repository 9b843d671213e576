"""The metadata of a GGUF file as a config.json. What it asks for and is not known here is refused by its key."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from kestrel.errors import CheckpointError
from kestrel.models.gguf.header import GgufHeader
from kestrel.models.gguf.tensors import ROPE_FACTORS, read_tensor
from kestrel.models.gguf.tokenizer import token_id, token_types

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
"""And their names on the hub."""

_READ = {
    "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length", "attention.value_length",
    "attention.sliding_window", "rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}  # fmt: skip
_NO_EFFECT = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"}
"""The tensors show the first two; the third says how the model was trained."""
_OF_EXPERTS = {
    "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}  # fmt: skip
_ONLY = {"attention.causal": True, "expert_count": 0, "expert_used_count": 0}
_ENDS = ("eos", "eot", "eom")
_NAMED_ENDS = {"<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "</s>"}
"""Control tokens that end a text. The metadata names one to three of them; Llama 3 and Qwen need the others too."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""How Llama 3.1 and its successors scale rope. A file holds the result alone, as a tensor."""


def read_hub_config(path: Path) -> dict[str, Any]:
    return hub_config(GgufHeader.read(path))


def read_chat_template(path: Path) -> str | None:
    """The text of the model's own template."""
    return GgufHeader.read(path).text("tokenizer.chat_template", "") or None


def hub_config(header: GgufHeader) -> dict[str, Any]:
    kind = header.text("general.architecture")
    if kind not in ARCHITECTURES:
        raise header.refusal("general.architecture", f"supported are: {', '.join(ARCHITECTURES)}")
    if header.count("split.count", 1) > 1:
        raise header.refusal("split.count", "models in several files are not supported; merge them into one")
    _refuse_unknown(header, kind)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{header.path}: the tensor token_embd.weight is missing; the file holds no whole model")
    heads = header.count(f"{kind}.attention.head_count")
    return {
        "model_type": ARCHITECTURES[kind],
        "vocab_size": embedding.shape[0],
        "hidden_size": header.count(f"{kind}.embedding_length"),
        "intermediate_size": header.count(f"{kind}.feed_forward_length"),
        "num_hidden_layers": header.count(f"{kind}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": header.count(f"{kind}.attention.head_count_kv", heads),
        "head_dim": _head_dim(header, kind),
        "max_position_embeddings": header.count(f"{kind}.context_length"),
        "rms_norm_eps": header.number(f"{kind}.attention.layer_norm_rms_epsilon"),
        "rope_theta": header.number(f"{kind}.rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(header, kind),
        "attention_bias": kind != "qwen2" and "blk.0.attn_q.bias" in header.tensors,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": token_id(header, "bos"),
        "eos_token_id": _end_ids(header),
        **_window(header, kind),
        **_experts(header, kind),
    }


def _refuse_unknown(header: GgufHeader, kind: str) -> None:
    for key, value in header.values.items():
        own = key.removeprefix(f"{kind}.")
        if own == key or own in _READ | _NO_EFFECT or (kind == "qwen3moe" and own in _OF_EXPERTS):
            continue
        if own not in _ONLY:
            raise header.refusal(key, "this key is not known here, and what it asks for may change the answers")
        if value != _ONLY[own]:
            raise header.refusal(key, f"only {_ONLY[own]} is supported")


def _head_dim(header: GgufHeader, kind: str) -> int:
    heads, dim = header.count(f"{kind}.attention.head_count"), header.count(f"{kind}.embedding_length")
    if heads < 1:
        raise header.refusal(f"{kind}.attention.head_count", "expected a whole number above 0")
    size = header.count(f"{kind}.attention.key_length", dim // heads)
    for key in (f"{kind}.attention.value_length", f"{kind}.rope.dimension_count"):
        if header.count(key, size) != size:
            raise header.refusal(key, f"only the size of a head ({size}) is supported")
    return size


def _window(header: GgufHeader, kind: str) -> dict[str, Any]:
    """Llama has no window on the hub; Mistral, which is stored as a Llama, may have one."""
    key = f"{kind}.attention.sliding_window"
    if not header.count(key, 0):
        return {}
    if kind != "llama":
        raise header.refusal(key, f"a sliding window is not supported for {kind}")
    return {"model_type": "mistral", "sliding_window": header.count(key)}


def _experts(header: GgufHeader, kind: str) -> dict[str, Any]:
    """All Qwen3 with experts weigh the chosen ones to a sum of one. Layers without a router are dense."""
    if kind != "qwen3moe":
        return {}
    counts = {name: header.count(f"{kind}.{key}") for key, name in _OF_EXPERTS.items()}
    layers = range(header.count(f"{kind}.block_count"))
    dense = [layer for layer in layers if f"blk.{layer}.ffn_gate_inp.weight" not in header.tensors]
    return {**counts, "norm_topk_prob": True, "mlp_only_layers": dense}


def _end_ids(header: GgufHeader) -> list[int]:
    """The one that the file calls the end of a text first."""
    header.count("tokenizer.ggml.eos_token_id")
    controls = token_types(header).controls
    named = [each for each, text in controls.items() if text in _NAMED_ENDS]
    given = [token_id(header, name) for name in _ENDS]
    return list(dict.fromkeys(each for each in (*given, *named) if each is not None))


# ---------------------------------------------------------------------- rope


def _rope_scaling(header: GgufHeader, kind: str) -> dict[str, Any] | None:
    own = f"{kind}.rope.scaling"
    factor = header.number(f"{own}.factor", header.number(f"{kind}.rope.scale_linear", 1.0)) or 1.0
    scaling = header.text(f"{own}.type", "linear")
    has_factors = ROPE_FACTORS in header.tensors
    if scaling == "none" or (scaling == "linear" and factor == 1.0):
        return _llama3_scaling(header, kind) if has_factors else None
    if has_factors or scaling not in ("linear", "yarn"):
        raise header.refusal(
            f"{own}.type", "supported are none, linear and yarn, without rope_freqs.weight beside them"
        )
    if scaling == "linear":
        return {"rope_type": "linear", "factor": factor}
    original = {"original_max_position_embeddings": header.count(f"{own}.original_context_length")}
    betas = {
        beta: header.number(f"{own}.yarn_{beta}")
        for beta in ("beta_fast", "beta_slow")
        if f"{own}.yarn_{beta}" in header.values
    }
    return {"rope_type": "yarn", "factor": factor, **original, **betas}


def _llama3_scaling(header: GgufHeader, kind: str) -> dict[str, Any] | None:
    """The tensor divides each frequency. Which scaling that is follows from its largest number."""
    given = read_tensor(header.path, header.tensors[ROPE_FACTORS]).double()
    factor = float(given.max())
    size = _head_dim(header, kind)
    powers = torch.arange(0, size, 2, dtype=torch.float64) / size
    turns = _LLAMA3["original_max_position_embeddings"] / (
        2 * math.pi * header.number(f"{kind}.rope.freq_base", 10_000.0) ** powers
    )
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - kept) / factor + kept)
    if given.shape != expected.shape or not torch.allclose(given, expected, rtol=1e-4):
        raise CheckpointError(
            f"{header.path}: the tensor {ROPE_FACTORS} scales rope in a way that is not known here; only the one of "
            "Llama 3.1 and its successors is"
        )
    return None if factor == 1.0 else {"rope_type": "llama3", "factor": factor, **_LLAMA3}
