"""Text models of the hub's format through the engine: the numbers and the tokens of `transformers`."""

from __future__ import annotations

import asyncio
import copy
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kestrel.adapters import save_adapter
from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.engine.api import warm_up
from kestrel.errors import CheckpointError, RequestError
from kestrel.families import adapter_shape, load, resolve
from kestrel.kernels.ops import PLAIN
from kestrel.models.adapting import SingleAdapter
from tests.exhaustive import sweep
from tests.layers.test_text_families import causal
from tests.llama.reference import is_greedy, logprobs, merged, reference
from tests.llama.tiny_folders import CONTEXT, KINDS, START, STOP, VARIANTS, random_adapter, write_folder

PROMPTS = [[START, *range(7 * n % 200, 7 * n % 200 + 5 + 3 * n)] for n in range(12)]
LONG = [START, *((31 * n) % 256 for n in range(150))]
MakeEngine = Callable[..., Awaitable[InferenceEngine]]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("llama")
    return {kind: write_folder(root / kind, kind) for kind in (*KINDS, *VARIANTS)}


@pytest.fixture(scope="session")
def models(folders: dict[str, Path]) -> dict[str, Any]:
    """As `transformers` reads the folders."""
    return {kind: reference(folders[kind]) for kind in KINDS}


@pytest.fixture
async def make_engine(folders: dict[str, Path]) -> AsyncIterator[MakeEngine]:
    engines: list[InferenceEngine] = []

    async def make(kind: str, **changes: Any) -> InferenceEngine:
        options: dict[str, Any] = {"model_path": folders[kind], "device": "cpu", "kv_cache_pages": 400, "page_size": 4}
        engines.append(await InferenceEngine.create(RuntimeConfig(**(options | changes))))
        return engines[-1]

    yield make
    for engine in engines:
        await engine.shutdown(drain=False, timeout_s=20)


async def tokens(engine: InferenceEngine, prompt: list[int], count: int = 12, **more: Any) -> list[int]:
    result = await engine.run("complete", prompt=prompt, max_tokens=count, temperature=0.0, **more)
    return result.output["token_ids"]


@pytest.mark.parametrize("kind", KINDS)
async def test_log_probabilities_and_tokens_are_those_of_transformers(
    kind: str, make_engine: MakeEngine, models: dict[str, Any]
) -> None:
    engine = await make_engine(kind)
    result = await engine.run("complete", prompt=LONG, max_tokens=1, temperature=0.0, prompt_logprobs=5)
    expected = logprobs(models[kind], LONG)
    assert expected.std() > 0.5
    for at, entry in enumerate(result.output["prompt_logprobs"][1:]):
        assert entry["logprob"] == pytest.approx(float(expected[at, LONG[at + 1]]), abs=1e-4)
    for prompt in (PROMPTS[0], PROMPTS[5], LONG):
        assert is_greedy(models[kind], prompt, await tokens(engine, prompt), 12)


@pytest.mark.parametrize("kind", VARIANTS)
@torch.inference_mode()
def test_log_probabilities_of_variants_are_those_of_transformers(kind: str, folders: dict[str, Path]) -> None:
    loaded = load(resolve(RuntimeConfig(model_path=folders[kind], device="cpu")), "cpu", torch.float32)
    model: Any = loaded.model
    hidden = model(model.embed(torch.tensor(LONG)), torch.arange(len(LONG)), causal)
    expected = logprobs(reference(folders[kind]), LONG)
    assert expected.std() > 0.5
    torch.testing.assert_close(model.logits(hidden).log_softmax(-1), expected, rtol=0, atol=1e-4)


@sweep("kind", ["llama", "qwen2", "qwen3", "qwen3_moe"], always=["qwen3"])
async def test_tokens_do_not_depend_on_batching_prefix_hits_chunks_or_preemption(
    kind: str, make_engine: MakeEngine, models: dict[str, Any]
) -> None:
    prompts = [*PROMPTS, LONG, [*LONG[:100], 9, 8, 7]]
    batched = await make_engine(kind, max_batch_size=8, enable_prefix_cache=True)
    expected = await asyncio.gather(*(tokens(batched, prompt) for prompt in prompts))
    assert len({tuple(one) for one in expected}) > 10
    for prompt, found in zip(prompts, expected, strict=True):
        assert is_greedy(models[kind], prompt, found, 12)
    assert await asyncio.gather(*(tokens(batched, prompt) for prompt in prompts)) == expected, "after prefix hits"
    assert batched.snapshot().prefix_hit_tokens_total > 300
    chunked = await make_engine(kind, max_batch_size=4, max_prefill_tokens=16, enable_prefix_cache=False)
    assert await asyncio.gather(*(tokens(chunked, prompt) for prompt in prompts)) == expected
    few_pages = {"kv_cache_pages": 52, "max_seq_length": 200}
    crowded = await make_engine(kind, max_batch_size=8, enable_prefix_cache=False, **few_pages)
    assert await asyncio.gather(*(tokens(crowded, prompt) for prompt in prompts)) == expected
    assert crowded.snapshot().preemptions_total > 0


@sweep("kind", ["llama", "qwen2", "qwen3", "qwen3_moe"], always=["qwen2", "qwen3_moe"])
async def test_adapters_give_what_their_deltas_give_when_built_in(
    kind: str, make_engine: MakeEngine, folders: dict[str, Path], models: dict[str, Any], tmp_path: Path
) -> None:
    shape = adapter_shape(resolve(RuntimeConfig(model_path=folders[kind], device="cpu")))
    adapters = {
        "all": random_adapter(shape, 6, seed=1),
        "some": random_adapter(shape, 16, seed=2, matrices=("q", "v", "up", "gate_up")),
    }
    for name, adapter in adapters.items():
        save_adapter(adapter, tmp_path / f"{name}.safetensors")
    engine = await make_engine(kind, adapter_dir=tmp_path, max_adapters=2, max_batch_size=8)
    named = {None: models[kind]} | {name: merged(folders[kind], adapter) for name, adapter in adapters.items()}
    asked = [(name, prompt) for prompt in (PROMPTS[2], PROMPTS[7], LONG) for name in named]
    found = await asyncio.gather(*(tokens(engine, prompt, settings={"adapter": name}) for name, prompt in asked))
    assert found[0] != found[1] != found[2]
    for (name, prompt), one in zip(asked, found, strict=True):
        assert is_greedy(named[name], prompt, one, 12)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@torch.inference_mode()
def test_the_plain_way_to_apply_an_adapter_knows_parts_of_matrices(kind: str, folders: dict[str, Path]) -> None:
    located = resolve(RuntimeConfig(model_path=folders[kind], device="cpu"))
    shape, loaded = adapter_shape(located), load(located, "cpu", torch.float32)
    adapter = random_adapter(shape, 6, seed=4, matrices=("q", "v", "o", "up", "gate_up", "router"))
    model: Any = loaded.model
    ids = torch.tensor(LONG)
    hidden = model(model.embed(ids), torch.arange(len(LONG)), causal, SingleAdapter(adapter, shape))
    expected = logprobs(merged(folders[kind], adapter), LONG)
    torch.testing.assert_close(model.logits(hidden).log_softmax(-1), expected, rtol=0, atol=1e-4)


async def test_an_adapter_of_another_family_is_refused_by_its_matrices(
    make_engine: MakeEngine, folders: dict[str, Path], tmp_path: Path
) -> None:
    shape = adapter_shape(resolve(RuntimeConfig(model_path=folders["llama"], device="cpu")))
    foreign = random_adapter(shape, 4, seed=1, matrices="q")
    renamed = {target._replace(matrix="qkv"): pair for target, pair in foreign.targets.items()}
    save_adapter(type(foreign)("kestrel-adapter", 4, renamed), tmp_path / "foreign.safetensors")
    engine = await make_engine("llama", adapter_dir=tmp_path)
    with pytest.raises(Exception, match="adapts the matrices qkv, which the base model does not have"):
        await tokens(engine, PROMPTS[0], settings={"adapter": "foreign"})


async def test_an_adapter_of_dense_layers_is_refused_where_there_are_experts(
    make_engine: MakeEngine, folders: dict[str, Path], tmp_path: Path
) -> None:
    dense = adapter_shape(resolve(RuntimeConfig(model_path=folders["llama"], device="cpu")))
    save_adapter(random_adapter(dense, 4, seed=1, matrices=("q", "up")), tmp_path / "dense.safetensors")
    engine = await make_engine("qwen3_moe", adapter_dir=tmp_path)
    told = r"adapts the matrices up, which the base model does not have \(layer 0 has q, k, v, o, router, gate_up, down"
    with pytest.raises(Exception, match=told):
        await tokens(engine, PROMPTS[0], settings={"adapter": "dense"})


async def test_an_adapter_whose_delta_reads_a_norm_that_is_not_there_is_refused(
    make_engine: MakeEngine, folders: dict[str, Path], tmp_path: Path
) -> None:
    shape = adapter_shape(resolve(RuntimeConfig(model_path=folders["llama"], device="cpu")))
    adapter = replace(random_adapter(shape, 4, seed=1, matrices="o"), proj_input="block_norm")
    save_adapter(adapter, tmp_path / "norm.safetensors")
    engine = await make_engine("llama", adapter_dir=tmp_path)
    with pytest.raises(Exception, match="proj_input block_norm"):
        await tokens(engine, PROMPTS[0], settings={"adapter": "norm"})


async def test_a_text_begins_as_the_tokenizer_begins_it_and_ends_at_any_end_id(make_engine: MakeEngine) -> None:
    llama, qwen = await make_engine("llama"), await make_engine("qwen2")
    assert (llama.profile.bos, qwen.profile.bos) == (START, None)
    for engine, start in ((llama, [START]), (qwen, [])):
        echoed = await engine.run("complete", prompt="hey", max_tokens=1, echo=True)
        assert echoed.output["prompt_token_ids"] == [*start, *engine.profile.tokenizer.encode("hey")]
        embedded = await engine.run("embed", text="hey")
        assert embedded.output["num_tokens"] == 3
    assert llama.profile.tokenizer.encode("<s></s>") == [byte_id(llama, letter) for letter in "<s></s>"]
    ended = await llama.run("complete", prompt=LONG, max_tokens=8, allowed_ids=[65, STOP + 1], temperature=0.0)
    barred = await llama.run("complete", prompt=LONG, max_tokens=8, allowed_ids=[65, STOP + 1], ignore_eos=True)
    assert barred.output["token_ids"] == [65] * 8
    assert set(ended.output["token_ids"]) <= {65}


def byte_id(engine: InferenceEngine, letter: str) -> int:
    return engine.profile.tokenizer.encode(letter)[0]


async def test_an_embedding_is_the_mean_of_the_last_hidden_states(
    make_engine: MakeEngine, models: dict[str, Any]
) -> None:
    engine, model = await make_engine("qwen3"), models["qwen3"]
    found = (await engine.run("embed", token_ids=LONG)).output
    with torch.inference_mode():
        hidden = model.model(torch.tensor([LONG])).last_hidden_state[0, 1:].mean(0)
    torch.testing.assert_close(torch.tensor(found["embedding"]), hidden / hidden.norm(), rtol=0, atol=1e-5)


async def test_what_a_text_model_cannot_do_is_refused_by_name(make_engine: MakeEngine) -> None:
    engine = await make_engine("llama")
    for skill, fields in (
        ("query", {"question": "what?"}),
        ("caption", {}),
        ("chat", {"messages": [{"role": "user", "content": "hi"}]}),
    ):
        with pytest.raises(RequestError, match=rf"{skill} is not supported by llama; use one of: complete, embed"):
            await engine.run(skill, **fields)
    with pytest.raises(RequestError, match="reads no pictures"):
        await engine.run("complete", prompt="hey", image=b"anything")
    assert await warm_up(engine) > 0
    formatted = await engine.run("complete", prompt="hey", response_format={"type": "regex", "regex": "[ab]{3}"})
    assert formatted.output["text"] in {a + b + c for a in "ab" for b in "ab" for c in "ab"}


REFUSED = {
    "hidden_act": ("gelu", r"hidden_act is 'gelu'; only 'silu'"),
    "mlp_bias": (True, "mlp_bias is True"),
    "rope_scaling": ({"rope_type": "dynamic", "factor": 8.0}, r"rope_scaling.rope_type is 'dynamic'"),
    "num_hidden_layers": (0, "num_hidden_layers is 0; expected a whole number above 0"),
    "eos_token_id": (None, "eos_token_id is missing"),
    "model_type": ("gemma", r"no known family of models \(model_type 'gemma'\); known are: moondream, llama"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_a_config_asks_for_and_is_not_built_is_refused_by_name(
    field: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    value, message = REFUSED[field]
    folder = shutil.copytree(folders["llama"], tmp_path / "changed")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(CheckpointError, match=message):
        load(resolve(RuntimeConfig(model_path=folder, device="cpu")), "cpu", torch.float32)


def test_a_sliding_window_is_refused_unless_it_spans_the_context(tmp_path: Path) -> None:
    narrow = write_folder(tmp_path / "narrow", "mistral", sliding_window=CONTEXT // 2)
    with pytest.raises(CheckpointError, match="sliding_window is 128"):
        load(resolve(RuntimeConfig(model_path=narrow, device="cpu")), "cpu", torch.float32)
    wide = write_folder(tmp_path / "wide", "mistral", sliding_window=CONTEXT)
    load(resolve(RuntimeConfig(model_path=wide, device="cpu")), "cpu", torch.float32)


@pytest.mark.parametrize("experts_only", [False, True])
@torch.inference_mode()
def test_experts_in_float8_give_what_their_rounded_weights_give(experts_only: bool, folders: dict[str, Path]) -> None:
    located = resolve(RuntimeConfig(model_path=folders["qwen3_moe"], device="cpu"))
    model: Any = load(located, "cpu", torch.float32).model
    rounded, ids = copy.deepcopy(model), torch.tensor(LONG)
    model.fuse(PLAIN)
    model.to_fp8(experts_only=experts_only)
    narrow = {name: one for name, one in model.named_parameters() if one.dtype == torch.float8_e4m3fn}
    assert {"blocks.0.mlp.fc1.weight", "blocks.2.mlp.fc2.weight"} <= narrow.keys()
    assert ("blocks.0.attn.qkv.weight" in narrow, "blocks.1.mlp.down.weight" in narrow) == (not experts_only,) * 2
    assert not any("router" in name for name in narrow)
    for name, numbers in narrow.items():
        layer = model.get_submodule(name.removesuffix(".weight"))
        scale = layer.scale_EF if numbers.ndim == 3 else layer.scale_F
        rounded.get_parameter(name).data = numbers.float() * scale[..., None]

    def run(text: Any, count: int) -> torch.Tensor:
        return text.logits(text(text.embed(ids[:count]), torch.arange(count), causal))

    torch.testing.assert_close(run(model, 7), run(rounded, 7), rtol=0, atol=1e-4)
    # With many positions their rows are rounded too.
    found, expected = run(model, len(LONG)), run(rounded, len(LONG))
    error = ((found - expected).norm(dim=1) / expected.norm(dim=1)).median()
    assert 1e-3 < error < 0.15


def test_a_checkpoint_that_lacks_an_expert_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "seven", "qwen3_moe", num_experts=7)
    with pytest.raises(CheckpointError, match=r"missing tensors.*blocks.0.mlp.fc1.weight"):
        load(resolve(RuntimeConfig(model_path=folder, device="cpu")), "cpu", torch.float32)
    folder = write_folder(tmp_path / "five", "qwen3_moe", num_experts=5)
    with pytest.raises(CheckpointError, match=r"unexpected tensors.*model.layers.0.mlp.experts.5.down_proj.weight"):
        load(resolve(RuntimeConfig(model_path=folder, device="cpu")), "cpu", torch.float32)


def test_a_tied_head_is_held_once(folders: dict[str, Path]) -> None:
    loaded: Any = load(resolve(RuntimeConfig(model_path=folders["tied"], device="cpu")), "cpu", torch.float32)
    assert loaded.model.lm_head.weight is loaded.model.wte
