"""What `transformers` makes of the tiny folders, and of a .gguf file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
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


@torch.no_grad()
def merged(folder: Path, adapter: Adapter) -> Any:
    """With an adapter built in."""
    model = reference(folder)
    for target, pair in adapter.targets.items():
        module = model.model.layers[target.layer].get_submodule(MODULES[target.matrix])
        module.weight += adapter.scale * pair.b @ pair.a
    return model


@torch.inference_mode()
def logprobs(model: Any, ids: list[int]) -> Tensor:
    return model(torch.tensor([ids])).logits[0].log_softmax(-1)


@torch.inference_mode()
def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """Without a cache; it ends before an id that ends a text."""
    context = list(ids)
    for _ in range(count):
        chosen = int(model(torch.tensor([context])).logits[0, -1].argmax())
        if chosen in (STOP, END_OF_TURN):
            break
        context.append(chosen)
    return context[len(ids) :]
