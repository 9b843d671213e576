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
from tests.adapters.peft_files import NAMES, fused_tensors, peft_tensors, write_peft
from tests.llama.reference import expert_deltas, logprobs, reference, with_deltas
from tests.llama.tiny_folders import KINDS, START, write_folder

PROMPT = [START, *((31 * n) % 256 for n in range(40))]
PATTERNS = {"rank_pattern": {"layers.1.mlp.up_proj": 2, "q_proj": 6}, "alpha_pattern": {"v_proj": 3}}
OF_PARAMETERS = {
    "target_modules": ["q_proj"], "target_parameters": ["gate_up_proj", "down_proj", "gate.weight"],
    "rank_pattern": {r".*\.gate_up_proj": 8}, "alpha_pattern": {r".*\.gate_up_proj": 16, "gate.weight": 2},
    "peft_version": "0.21.2",
}  # fmt: skip
"""As peft has it for `target_modules` with gate_proj, up_proj and down_proj, where experts are parameters."""


def scale(case: str, name: str) -> float:
    """By hand, from r = 4 and lora_alpha = 8."""
    if case == "stabilised":
        return 8 / math.sqrt(4)
    ends = {"q_proj": 8 / 6, "v_proj": 3 / 4, "layers.1.mlp.up_proj": 8 / 2} if case == "patterns" else {}
    ends |= {"experts.2.up_proj": 8 / 2} if case == "some experts" else {"mlp.gate": 2 / 4} if case == "fused" else {}
    return next((value for end, value in ends.items() if f".{end}.lora" in name), 8 / 4)


def adapters(kind: str) -> dict[str, tuple[dict[str, Tensor], dict[str, Any]]]:
    every = {"target_modules": list(NAMES)}
    if kind == "qwen3_moe":
        some = peft_tensors(["gate_proj", "up_proj"], seed=5, kind=kind, rank=2)
        some = {name: tensor for name, tensor in some.items() if ".experts.2.up_proj." in name}
        some |= {n: t for n, t in peft_tensors(["down_proj"], seed=6, kind=kind).items() if ".experts.4." in n}
        chosen = {"target_modules": r".*experts\.(2\.up|4\.down)_proj", "rank_pattern": {"experts.2.up_proj": 2}}
        with_router = [*NAMES, "gate"]
        return {
            "each expert": (peft_tensors(with_router, seed=1, kind=kind), {"target_modules": with_router}),
            "some experts": (some, chosen),
            "fused": (peft_tensors(["q_proj", "gate"], seed=7, kind=kind) | fused_tensors(4), OF_PARAMETERS),
        }
    mixed = peft_tensors(list(NAMES), seed=3, q_proj=6)
    narrow = peft_tensors(["up_proj"], seed=4, up_proj=2)
    mixed |= {name: tensor for name, tensor in narrow.items() if ".layers.1." in name}
    return {
        "plain": (peft_tensors(list(NAMES), seed=1), every),
        "stabilised": (peft_tensors(["q_proj", "v_proj"], seed=2), {"use_rslora": True}),
        "patterns": (mixed, every | PATTERNS),
    }


def merged(folder: Path, case: str, tensors: dict[str, Tensor]) -> Any:
    deltas: dict[str, Tensor] = {}
    for name, a in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        module, b = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"), name.replace("_A.", "_B.")
        if module.endswith(("experts", "base_layer")):
            count = KINDS["qwen3_moe"]["num_experts"]
            a_ERD, b_FRE = a.view(count, -1, a.shape[1]), tensors[b].view(len(tensors[b]), -1, count)
            delta = scale(case, name) * torch.einsum("fre,erd->efd", b_FRE, a_ERD)
            matrix = "gate_up" if module.endswith("base_layer") else "down"
            deltas |= expert_deltas(module.removesuffix(".base_layer"), matrix, delta)
        else:
            deltas[f"{module}.weight"] = scale(case, name) * tensors[b] @ a
    return with_deltas(folder, deltas)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
async def test_log_probabilities_are_those_of_transformers_with_the_deltas_built_in(kind: str, tmp_path: Path) -> None:
    folder, made = write_folder(tmp_path / "tiny", kind), adapters(kind)
    for case, (tensors, changes) in made.items():
        write_peft(tmp_path / "adapters" / case.replace(" ", "-"), tensors, **changes)
    options: dict[str, Any] = {"model_path": folder, "device": "cpu", "kv_cache_pages": 100}
    async with await InferenceEngine.create(RuntimeConfig(adapter_dir=tmp_path / "adapters", **options)) as engine:
        asked = (
            engine.run("complete", prompt=PROMPT, max_tokens=1, prompt_logprobs=1, settings={"adapter": name})
            for name in (None, *(case.replace(" ", "-") for case in made))
        )
        found = [
            [entry["logprob"] for entry in one.output["prompt_logprobs"][1:]] for one in await asyncio.gather(*asked)
        ]
    plain = logprobs(reference(folder), PROMPT)
    expected = [plain, *(logprobs(merged(folder, case, tensors), PROMPT) for case, (tensors, _) in made.items())]
    for case, ours, theirs in zip(("none", *made), found, expected, strict=True):
        assert case == "none" or float((theirs - plain).abs().max()) > 0.1, "the adapter changes something"
        assert ours == pytest.approx([float(theirs[at, PROMPT[at + 1]]) for at in range(len(PROMPT) - 1)], abs=1e-4), (
            case
        )
