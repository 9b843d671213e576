"""Weights of a GGUF file under the hub's names, in the hub's order of rows, dequantised when they are read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kestrel.errors import CheckpointError
from kestrel.models.gguf.header import GgufHeader, GgufTensor

ROPE_FACTORS = "rope_freqs.weight"
"""Not a weight: the config says what is in it."""

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""One tensor in the file, one for each expert on the hub."""
_INTERLEAVED = ("llama",)
"""Architectures whose pairs for rope are the rows 2i and 2i + 1 of a head; on the hub they are i and i + half."""
_PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""By the number that the format gives a type."""
_CHUNK = 2**18
"""Numbers that a thread dequantises at a time: the package takes several times their memory meanwhile."""


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor of the file as `GgufTensors.read` gives it."""

    stored: GgufTensor
    dtype: torch.dtype
    """float32 for everything that is quantised."""
    num_heads: int | None = None
    """Heads whose rows have to be put into the hub's order."""


class GgufTensors:
    def __init__(self, header: GgufHeader) -> None:
        self._path = header.path
        _require_readable(header)
        self.named: Mapping[str, NamedTensor] = {
            own: named
            for name, tensor in header.tensors.items()
            if name != ROPE_FACTORS
            for own, named in _named(header, name, tensor).items()
        }
        """In the order of the file. What the hub has no name for keeps its own; a strict load refuses it by that."""

    def read(self, name: str) -> Tensor:
        tensor = self.named[name]
        data = read_tensor(self._path, tensor.stored)
        return data if tensor.num_heads is None else _halves_apart(data, tensor.num_heads)


def hub_name(name: str) -> str:
    found = _NAME.fullmatch(name)
    if found is None:
        return name
    layer, module, kind = found.groups()
    if layer is None:
        return f"{_OUTER[module]}.{kind}" if module in _OUTER else name
    return f"model.layers.{layer}.{_MODULES[module]}.{kind}" if module in _MODULES else name


def _named(header: GgufHeader, name: str, tensor: GgufTensor) -> dict[str, NamedTensor]:
    dtype = _PLAIN.get(tensor.kind, torch.float32)
    found = _NAME.fullmatch(name)
    if found is None or found[1] is None or found[2] not in _EXPERTS or len(tensor.shape) != 3:
        return {hub_name(name): NamedTensor(tensor, dtype, _heads_to_reorder(header, name, tensor))}
    size, experts = tensor.num_bytes // max(tensor.shape[0], 1), f"model.layers.{found[1]}.mlp.experts"
    return {
        f"{experts}.{expert}.{_EXPERTS[found[2]]}.{found[3]}": NamedTensor(
            GgufTensor(tensor.kind, tensor.shape[1:], tensor.offset + expert * size, size), dtype
        )
        for expert in range(tensor.shape[0])
    }


def _heads_to_reorder(header: GgufHeader, name: str, tensor: GgufTensor) -> int | None:
    kind = header.text("general.architecture")
    found = _NAME.fullmatch(name)
    if kind not in _INTERLEAVED or found is None or found[2] not in ("attn_q", "attn_k"):
        return None
    heads = header.count(f"{kind}.attention.head_count")
    if found[2] == "attn_k":
        heads = header.count(f"{kind}.attention.head_count_kv", heads)
    if heads < 1 or tensor.shape[0] % (2 * heads):
        raise CheckpointError(
            f"{header.path}: the tensor {name} has {tensor.shape[0]} rows, which are not {heads} heads of an even size"
        )
    return heads


def _halves_apart(data: Tensor, num_heads: int) -> Tensor:
    return data.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


# ---------------------------------------------------------------------- numbers


def read_tensor(path: Path, tensor: GgufTensor) -> Tensor:
    """One tensor; what is quantised comes as float32."""
    data = np.fromfile(path, np.uint8, tensor.num_bytes, offset=tensor.offset)
    if data.size < tensor.num_bytes:
        raise CheckpointError(f"{path} has become shorter while it was read; download or copy it again")
    plain = _PLAIN.get(tensor.kind)
    if plain is not None:
        return torch.from_numpy(data).view(plain).reshape(tensor.shape)
    from gguf import GGML_QUANT_SIZES, dequantize  # noqa: PLC0415

    block, block_bytes = GGML_QUANT_SIZES[tensor.kind]
    blocks = data.reshape(-1, block_bytes)
    numbers = torch.empty(len(blocks), block)

    def fill(first: int) -> None:
        part = slice(first, first + _CHUNK // block)
        row = blocks[part].reshape(1, -1)  # the package takes a few rows at a time
        numbers.numpy()[part] = dequantize(row, tensor.kind).reshape(-1, block)

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(fill, range(0, len(blocks), _CHUNK // block)))
    return numbers.reshape(tensor.shape)


def _require_readable(header: GgufHeader) -> None:
    """Refuses types that the installed package cannot dequantise, before anything is read."""
    from gguf import GGML_QUANT_SIZES, dequantize  # noqa: PLC0415

    for kind in {tensor.kind for tensor in header.tensors.values()} - _PLAIN.keys():
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            name = next(name for name, tensor in header.tensors.items() if tensor.kind is kind)
            raise CheckpointError(
                f"{header.path}: the tensor {name} is stored as {kind.name}, which the installed package gguf cannot "
                "dequantise; install its newest release, or use a file with another quantisation"
            ) from None
