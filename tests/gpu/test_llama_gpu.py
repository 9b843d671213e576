"""Text models on a GPU: the Triton bundle in graphs, with float8 and adapters, held to the plain operations on the CPU
(which tests/llama holds to `transformers`)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kestrel.adapters import save_adapter
from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.families import adapter_shape, resolve
from tests.llama.tiny_folders import random_adapter, write_folder

pytestmark = pytest.mark.gpu
PROMPTS = [[256, *range(9 * n, 9 * n + 6 + 5 * n)] for n in range(6)]
ASKED = [(name, prompt) for prompt in PROMPTS for name in (None, "mine")]
KINDS = ("llama", "qwen2", "qwen3")


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model, and an adapter of all its matrices in a folder beside it."""
    path = write_folder(tmp_path / "model", request.param)
    shape = adapter_shape(resolve(RuntimeConfig(model_path=path)))
    (tmp_path / "adapters").mkdir()
    save_adapter(random_adapter(shape, 6, seed=3), tmp_path / "adapters" / "mine.safetensors")
    return path


async def answers(folder: Path, num_times: int = 1, **changes: Any) -> list[list[dict[str, Any]]]:
    config = RuntimeConfig(
        model_path=folder, max_batch_size=8, kv_cache_pages=500, page_size=16, max_adapters=2,
        adapter_dir=folder.parent / "adapters", **changes,
    )  # fmt: skip

    async def one(engine: InferenceEngine, name: str | None, prompt: list[int]) -> dict[str, Any]:
        settings = {"adapter": name, "max_tokens": 10, "temperature": 0.0}
        return (await engine.run("complete", prompt=prompt, prompt_logprobs=0, settings=settings)).output

    async with await InferenceEngine.create(config) as engine:
        return [await asyncio.gather(*(one(engine, *each) for each in ASKED)) for _ in range(num_times)]


def ids_of(outputs: list[dict[str, Any]]) -> list[list[int]]:
    return [output["token_ids"] for output in outputs]


@pytest.mark.parametrize("folder", [*KINDS, "qwen3_moe"], indirect=True)
async def test_captured_steps_give_the_tokens_of_the_plain_operations(folder: Path) -> None:
    [expected] = await answers(folder, device="cpu", dtype="float32")
    # The second time in graphs that the first one asked for.
    for found in await answers(folder, num_times=2, device="cuda", dtype="float32"):
        assert ids_of(found) == ids_of(expected)


async def test_float8_with_adapters_stays_near(folder: Path) -> None:
    [expected] = await answers(folder, device="cpu", dtype="float32")
    for found in await answers(folder, num_times=2, device="cuda", dtype="bfloat16", quantization="fp8"):
        errors, sizes = [], []
        for ours, theirs in zip(found, expected, strict=True):
            for one, other in zip(ours["prompt_logprobs"][1:], theirs["prompt_logprobs"][1:], strict=True):
                errors.append(abs(one["logprob"] - other["logprob"]))
                sizes.append(abs(other["logprob"]))
        assert sum(errors) < 0.15 * sum(sizes)
