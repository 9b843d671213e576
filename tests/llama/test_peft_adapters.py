"""Adapters of peft's form through the engine: the log-probabilities of `transformers` with the deltas built in."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from tests.adapters.peft_files import NAMES, peft_tensors, write_peft
from tests.llama.reference import logprobs, reference
from tests.llama.tiny_folders import START, write_folder

PROMPT = [START, *((31 * n) % 256 for n in range(40))]
PATTERNS = {"rank_pattern": {"layers.1.mlp.up_proj": 2, "q_proj": 6}, "alpha_pattern": {"v_proj": 3}}


def scale(case: str, name: str) -> float:
    """By hand, from r = 4 and lora_alpha = 8."""
    if case == "stabilised":
        return 8 / math.sqrt(4)
    if case == "patterns":
        if ".q_proj." in name:
            return 8 / 6
        if ".v_proj." in name:
            return 3 / 4
        if ".layers.1.mlp.up_proj." in name:
            return 8 / 2
    return 8 / 4


def adapters() -> dict[str, tuple[dict[str, Tensor], dict[str, Any]]]:
    every = {"target_modules": list(NAMES)}
    mixed = peft_tensors(list(NAMES), seed=3, q_proj=6)
    narrow = peft_tensors(["up_proj"], seed=4, up_proj=2)
    mixed |= {name: tensor for name, tensor in narrow.items() if ".layers.1." in name}
    return {
        "plain": (peft_tensors(list(NAMES), seed=1), every),
        "stabilised": (peft_tensors(["q_proj", "v_proj"], seed=2), {"use_rslora": True}),
        "patterns": (mixed, every | PATTERNS),
    }


@torch.no_grad()
def merged(folder: Path, case: str, tensors: dict[str, Tensor]) -> Any:
    model = reference(folder)
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            module = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            module.weight += scale(case, name) * tensors[name.replace("lora_A", "lora_B")] @ a
    return model


async def test_log_probabilities_are_those_of_transformers_with_the_deltas_built_in(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny", "llama")
    for case, (tensors, changes) in adapters().items():
        write_peft(tmp_path / "adapters" / case, tensors, **changes)
    options: dict[str, Any] = {"model_path": folder, "device": "cpu", "kv_cache_pages": 100}
    async with await InferenceEngine.create(RuntimeConfig(adapter_dir=tmp_path / "adapters", **options)) as engine:
        asked = (
            engine.run("complete", prompt=PROMPT, max_tokens=1, prompt_logprobs=1, settings={"adapter": case})
            for case in adapters()
        )
        results = await asyncio.gather(*asked)
    plain = logprobs(reference(folder), PROMPT)
    for (case, (tensors, _)), result in zip(adapters().items(), results, strict=True):
        expected = logprobs(merged(folder, case, tensors), PROMPT)
        assert float((expected - plain).abs().max()) > 0.1, "the adapter changes something"
        found = [entry["logprob"] for entry in result.output["prompt_logprobs"][1:]]
        wanted = [float(expected[at, PROMPT[at + 1]]) for at in range(len(PROMPT) - 1)]
        assert found == pytest.approx(wanted, abs=1e-4), case
