"""What `transformers` makes of the tiny folders, and of a .gguf file."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from kestrel.adapters import Adapter
from kestrel.models.checkpoint_files import open_checkpoint
from kestrel.models.gguf.config import read_hub_config
from tests.llama.tiny_folders import END_OF_TURN, MODULES, STOP


def reference(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def of_gguf(path: Path) -> Any:
    """A Llama with the tensors of the file."""
    settings: Any = read_hub_config(path) | {"attn_implementation": "eager"}
    with open_checkpoint(path) as checkpoint:
        tensors = {name: checkpoint.read(name).float() for name in checkpoint.tensors}
    config = transformers.LlamaConfig(**settings)
    model: Any = transformers.LlamaForCausalLM.from_pretrained(None, config=config, state_dict=tensors)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return model.eval()


def merged(folder: Path, adapter: Adapter) -> Any:
    """With an adapter built in."""
    deltas: dict[str, Tensor] = {}
    for (layer, matrix), pair in adapter.targets.items():
        delta, own = adapter.scale * pair.b @ pair.a, f"model.layers.{layer}"
        if delta.ndim == 3:
            deltas |= expert_deltas(f"{own}.mlp.experts", matrix, delta)
        else:
            deltas[f"{own}.{'mlp.gate' if matrix == 'router' else MODULES[matrix]}.weight"] = delta
    return with_deltas(folder, deltas)


def expert_deltas(experts: str, matrix: str, delta: Tensor) -> dict[str, Tensor]:
    """Of all experts' `gate_up` or `down`, by the names of the checkpoint."""
    parts = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}[matrix]
    each = {part: delta.chunk(len(parts), dim=1)[number] for number, part in enumerate(parts)}
    return {f"{experts}.{e}.{part}.weight": own[e] for part, own in each.items() for e in range(len(delta))}


def with_deltas(folder: Path, deltas: Mapping[str, Tensor]) -> Any:
    """What `transformers` makes of the folder's tensors with these added, by name."""
    tensors = load_file(folder / "model.safetensors")
    with tempfile.TemporaryDirectory() as changed:
        shutil.copy(folder / "config.json", changed)
        added = {name: tensor + deltas[name] for name, tensor in tensors.items() if name in deltas}
        assert added.keys() == deltas.keys()
        save_file(tensors | added, Path(changed) / "model.safetensors", metadata={"format": "pt"})
        return reference(Path(changed))


@torch.inference_mode()
def logprobs(model: Any, ids: list[int]) -> Tensor:
    return model(torch.tensor([ids])).logits[0].log_softmax(-1)


@torch.inference_mode()
def is_greedy(model: Any, ids: list[int], found: list[int], count: int) -> bool:
    """Whether each token found is the likeliest after those before it: then all are what a loop of `count` would give.

    It ends before an id that ends a text.
    """
    likeliest = model(torch.tensor([ids + found])).logits[0, len(ids) - 1 :].argmax(-1).tolist()
    return likeliest[:-1] == found and (len(found) == count or likeliest[-1] in (STOP, END_OF_TURN))
