"""Small GGUF files, written with the package of the format's authors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from safetensors.torch import load_file

CONTROL, NORMAL = 3, 1
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}  # fmt: skip
TYPES = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}


def write_gguf(path: Path, values: Mapping[str, Any], tensors: Mapping[str, np.ndarray] = {}) -> Path:
    """Values of None are left out."""
    kinds = {name: (tensor, GGMLQuantizationType.F32) for name, tensor in tensors.items()}
    return write_quantised(path, values, kinds)


def write_quantised(
    path: Path, values: Mapping[str, Any], tensors: Mapping[str, tuple[np.ndarray, GGMLQuantizationType]]
) -> Path:
    """Tensors as the bytes of their type."""
    writer = GGUFWriter(path, str(values.get("general.architecture", "none")))
    writer.kv_data[0].clear()
    for key, value in values.items():
        if key == "general.alignment":
            writer.add_custom_alignment(value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_key_value(key, value, TYPES[type(value)])
    for name, (tensor, kind) in tensors.items():
        writer.add_tensor(name, tensor, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def convert(
    folder: Path, path: Path, kind: str, changes: Mapping[str, Any] = {}, quantised: GGMLQuantizationType | None = None
) -> Path:
    """A folder of tests.llama as the usual programs convert it, `changes` made to its metadata."""
    config = json.loads((folder / "config.json").read_text())
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    arrays: dict[str, np.ndarray] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        data = tensor.numpy()
        if kind == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            data = data.reshape(heads, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        arrays[name] = np.ascontiguousarray(data)
    tensors = {}
    for name, data in _with_joined_experts(arrays).items():
        stored = quantised if data.ndim > 1 and quantised is not None else GGMLQuantizationType.F32
        tensors[own_name(name)] = (gguf.quantize(data, stored), stored)
    return write_quantised(path, metadata(config, vocabulary, kind) | dict(changes), tensors)


def _with_joined_experts(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Those of a layer as one tensor."""
    groups: dict[str, dict[int, np.ndarray]] = {}
    for name, data in arrays.items():
        start, mark, rest = name.partition(".experts.")
        number, _, own = rest.partition(".")
        groups.setdefault(f"{start}{mark}{own}", {})[int(number or 0)] = data
    return {
        name: np.stack([each[number] for number in sorted(each)]) if ".experts." in name else each[0]
        for name, each in groups.items()
    }


def own_name(name: str) -> str:
    module, _, leaf = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, layer, module = module.split(".", 3)
        return f"blk.{layer}.{NAMES[module]}.{leaf}"
    return f"{NAMES[module]}.{leaf}"


def metadata(config: dict[str, Any], vocabulary: dict[str, Any], kind: str) -> dict[str, Any]:
    added = {token["id"]: token["content"] for token in vocabulary["added_tokens"]}
    tokens = {number: text for text, number in vocabulary["model"]["vocab"].items()} | added
    tokens[len(tokens)] = "ab"
    experts = {
        "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
    }  # fmt: skip
    return {
        "general.architecture": kind,
        "general.alignment": 64,
        **{f"{kind}.{key}": config[name] for key, name in experts.items() if name in config},
        f"{kind}.context_length": config["max_position_embeddings"],
        f"{kind}.embedding_length": config["hidden_size"],
        f"{kind}.block_count": config["num_hidden_layers"],
        f"{kind}.feed_forward_length": config["intermediate_size"],
        f"{kind}.attention.head_count": config["num_attention_heads"],
        f"{kind}.attention.head_count_kv": config["num_key_value_heads"],
        f"{kind}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{kind}.attention.key_length": config["head_dim"],
        f"{kind}.attention.value_length": config["head_dim"],
        f"{kind}.rope.dimension_count": config["head_dim"],
        f"{kind}.rope.freq_base": config["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [tokens[number] for number in range(len(tokens))],
        "tokenizer.ggml.token_type": [CONTROL if number in added else NORMAL for number in range(len(tokens))],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"][0],
        "tokenizer.ggml.eot_token_id": config["eos_token_id"][1],
        "tokenizer.ggml.add_bos_token": vocabulary["post_processor"] is not None,
        "tokenizer.chat_template": "{{ messages }}",
    }
