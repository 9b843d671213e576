"""Llamas with random weights, in memory or as a folder of the hub's format: speed does not depend on the values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kestrel.llama.config import LlamaConfig
from kestrel.llama.model import LlamaModel
from kestrel.models.checkpoint_files import TensorInfo, write_safetensors
from kestrel.models.locate import CONFIG_NAME, TOKENIZER_NAME
from kestrel.models.piece_tokenizer import byte_level_tokenizer, filled_up, piece_vocabulary
from kestrel.models.tokenizer import TextTokenizer

_SPREAD = 0.02
_LLAMA = {"model_type": "llama", "eos_token_id": 0, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192}
_SHAPES: dict[str, dict[str, Any]] = {
    "L1B": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128_256,
        "tie_word_embeddings": True,
    },
    "L8B": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14_336,
        "vocab_size": 128_256,
    },
    "Ltiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 512,
    },
}
"""The dimensions of Llama 3.2 1B and Llama 3.1 8B, and one for a look on a CPU."""


def random_llama(
    name: str, device: torch.device | str, dtype: torch.dtype, pieces: Iterable[str]
) -> tuple[LlamaModel, LlamaConfig, TextTokenizer]:
    """One of `RANDOM_NAMES`, made straight on `device`."""
    config = LlamaConfig.from_dict({**_LLAMA, **_SHAPES[name]})
    with torch.device("meta"):
        model = LlamaModel(config)
    model.to_empty(device=device).to(dtype)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            _fill_randomly(parameter, generator)
    model.reset_buffers(device)
    return model.requires_grad_(False).eval(), config, _tokenizer(config, pieces)


def write_random_folder(name: str, folder: Path, pieces: Iterable[str]) -> None:
    raw = {**_LLAMA, **_SHAPES[name]}
    config = LlamaConfig.from_dict(raw)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_NAME).write_text(json.dumps(raw, indent=1), encoding="utf-8")
    (folder / TOKENIZER_NAME).write_text(_tokenizer(config, pieces).to_json(), encoding="utf-8")
    infos = {name: TensorInfo(shape, torch.bfloat16) for name, shape in _hub_shapes(config)}
    write_safetensors(folder / "model.safetensors", infos, _random_tensors(infos))


def _hub_shapes(config: LlamaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    dim, ff_dim = config.dim, config.ff_dim
    matrices = {
        "self_attn.q_proj": (config.q_dim, dim),
        "self_attn.k_proj": (config.kv_dim, dim),
        "self_attn.v_proj": (config.kv_dim, dim),
        "self_attn.o_proj": (dim, config.q_dim),
        "mlp.gate_proj": (ff_dim, dim),
        "mlp.up_proj": (ff_dim, dim),
        "mlp.down_proj": (dim, ff_dim),
        "input_layernorm": (dim,),
        "post_attention_layernorm": (dim,),
    }
    yield "model.embed_tokens.weight", (config.vocab_size, dim)
    for layer in range(config.n_layers):
        for matrix, shape in matrices.items():
            yield f"model.layers.{layer}.{matrix}.weight", shape
    yield "model.norm.weight", (dim,)
    if not config.is_tied:
        yield "lm_head.weight", (config.vocab_size, dim)


def _random_tensors(infos: dict[str, TensorInfo]) -> Iterator[tuple[str, Tensor]]:
    # Eight billion numbers take a CPU minutes.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(0)
    for name, info in infos.items():
        values = torch.empty(info.shape, dtype=info.dtype, device=device)
        _fill_randomly(values, generator)
        yield name, values.cpu()


def _fill_randomly(values: Tensor, generator: torch.Generator) -> None:
    values.normal_(0.0, _SPREAD, generator=generator)
    if values.ndim == 1:  # a norm: no other vector is in these models
        values.add_(1.0)


def _tokenizer(config: LlamaConfig, pieces: Iterable[str]) -> TextTokenizer:
    vocabulary, merges = piece_vocabulary(pieces)
    return TextTokenizer(byte_level_tokenizer(filled_up(vocabulary, config.vocab_size), merges))
