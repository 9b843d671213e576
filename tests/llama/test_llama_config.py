"""What a config.json and a generation_config.json mean: rotary positions, experts, end ids, defaults, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kestrel.config import RuntimeConfig
from kestrel.errors import CheckpointError
from kestrel.families import find_family, load, resolve
from kestrel.kernels.rotary import rope_tables
from kestrel.llama.config import ExpertsConfig, LlamaConfig
from kestrel.skills import default_registry
from kestrel.skills.base import ModelProfile, SkillDefaults
from tests.llama.tiny_folders import COMMON, END_OF_TURN, KINDS, STOP, write_folder

NEUTRAL = SkillDefaults(temperature=1.0, top_p=1.0)


def read(kind: str, generation: dict[str, Any] | None = None, **changes: Any) -> LlamaConfig:
    config = {**COMMON, **KINDS[kind], **changes}
    return LlamaConfig.from_dict({name: value for name, value in config.items() if value != "absent"}, generation or {})


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}  # fmt: skip
SCALINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn with an attention factor": {**YARN, "attention_factor": 1.25},
    "yarn with mscale": {**YARN, "mscale": 0.8, "mscale_all_dim": 1.1},
    "yarn with half of mscale": {**YARN, "mscale": 0.8},
    "yarn with betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn not truncated": {**YARN, "truncate": False},
    "yarn without a factor": {**YARN, "factor": None},
    "yarn without a context": {"rope_type": "yarn", "factor": 2.0},
}


@pytest.mark.parametrize("name", SCALINGS)
def test_rotations_are_those_of_transformers(name: str) -> None:
    from transformers import LlamaConfig as TheirConfig  # noqa: PLC0415
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # noqa: PLC0415

    sizes = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "max_position_embeddings": 4096}
    asked = {**sizes, "rope_theta": 500_000.0, "rope_scaling": SCALINGS[name] or None}
    theirs = LlamaRotaryEmbedding(TheirConfig(**asked))
    positions = torch.tensor([[0, 1, 7, 100, 511, 1024, 4095]])
    cos, sin = theirs(torch.zeros(1), positions)
    ours = read("llama", **asked)
    own_cos, own_sin = rope_tables(4096, 64, ours.rope_theta, "cpu", ours.rope_scaling)
    # Angles are fp32: at the last position a bit of them is 2e-4.
    for own, given in ((own_cos, cos), (own_sin, sin)):
        torch.testing.assert_close(own[positions[0]], given[0, :, :32], rtol=0, atol=5e-4)
        torch.testing.assert_close(own[positions[0, :4]], given[0, :4, :32], rtol=0, atol=2e-5)


def test_scalings_are_read_from_old_and_new_fields() -> None:
    expected = read("llama", rope_scaling=LLAMA3).rope_scaling
    assert expected is not None
    old_key = {"type": "llama3", **{name: value for name, value in LLAMA3.items() if name != "rope_type"}}
    assert read("llama", rope_scaling=old_key).rope_scaling == expected
    both = read("llama", rope_theta="absent", rope_parameters={**LLAMA3, "rope_theta": 5e5})
    assert (both.rope_scaling, both.rope_theta) == (expected, 5e5)
    outside = {name: value for name, value in LLAMA3.items() if not name.startswith("original")}
    assert read("llama", rope_scaling=outside, original_max_position_embeddings=512).rope_scaling == expected
    plain = read("llama", rope_parameters={"rope_type": "default", "rope_theta": 7.0})
    assert (plain.rope_scaling, plain.rope_theta) == (None, 7.0)


def test_yarn_stretches_the_context_that_it_names() -> None:
    assert read("llama", max_position_embeddings=1024, rope_scaling=YARN).max_context == 4096
    assert read("llama", max_position_embeddings=8192, rope_scaling=YARN).max_context == 8192
    unnamed = {"rope_type": "yarn", "factor": 4.0}
    assert read("llama", max_position_embeddings=1024, rope_scaling=unnamed).max_context == 1024


def test_which_layers_have_experts() -> None:
    assert read("qwen3_moe").experts == ExpertsConfig(6, 3, 24, False, frozenset({0, 2}))
    sixth = read("qwen3_moe", num_hidden_layers=7, decoder_sparse_step=3, mlp_only_layers=[2], norm_topk_prob=False)
    assert sixth.experts == ExpertsConfig(6, 3, 24, True, frozenset({5}))
    renamed = read("qwen3_moe", num_experts="absent", num_local_experts=5).experts
    assert renamed is not None
    assert renamed.num_experts == 5
    for dense in ({"num_experts": 0}, {"mlp_only_layers": [0, 1, 2]}, {"decoder_sparse_step": 4}):
        assert read("qwen3_moe", **dense).experts is None
    absent = dict.fromkeys(("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"), "absent")
    assert read("qwen3_moe", **absent).experts == ExpertsConfig(128, 8, 768, True, frozenset({0, 2}))


def test_an_absent_field_means_what_its_kind_means_by_it() -> None:
    assert read("llama", num_key_value_heads="absent", head_dim="absent").n_kv_heads == 4
    assert read("qwen2", num_attention_heads=32, num_key_value_heads=None, head_dim="absent").n_kv_heads == 32
    assert read("qwen3", head_dim="absent").head_dim == 128
    assert read("mistral", num_attention_heads=16, num_key_value_heads="absent").n_kv_heads == 8
    assert read("qwen2").qkv_bias
    assert not read("qwen2", attention_bias=True).proj_bias


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "longrope": ("llama", {"rope_scaling": {"type": "longrope"}}, r"rope_scaling\.type is 'longrope'; only 'default'"),
    "mrope": ("qwen2", {"rope_parameters": {"rope_type": "mrope"}}, r"rope_parameters\.rope_type is 'mrope'"),
    "no factor": ("llama", {"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor is missing; expected a number"),
    "llama3 in part": (
        "llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"rope_scaling\.low_freq_factor is missing",
    ),
    "llama3 swapped": ("llama", {"rope_scaling": {**LLAMA3, "low_freq_factor": 8.0}}, r"high_freq_factor is 4\.0"),
    "a text": ("llama", {"rope_scaling": "yarn"}, r"rope_scaling is 'yarn'; expected an object"),
    "part of a head": ("llama", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5; only 1\.0"),
    "part of a head, new": (
        "llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, r"rope_parameters\.partial_rotary_factor is 0\.5",
    ),
    "interleaved": ("llama", {"rope_interleaved": True}, "rope_interleaved is True"),
    "quantised": ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantization_config is .*not quantised"),
    "activation": ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "window": ("mistral", {"sliding_window": 64}, "sliding_window is 64; attention over fewer than all 256"),
    "window by default": (
        "mistral", {"sliding_window": "absent", "max_position_embeddings": 8192}, "sliding_window is 4096",
    ),
    "window turned on": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 64}, "sliding_window is 64"),
    "window of some layers": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}, "sliding_window is 64",
    ),
    "window by layer types": (
        "qwen3", {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 64},
        "sliding_window is 64",
    ),
    "chunks": ("llama", {"layer_types": ["chunked_attention"] * 3}, "layer_types is .*only 'full_attention'"),
    "kv heads": ("llama", {"num_key_value_heads": 3}, "num_key_value_heads is 3; it has to divide the 4"),
    "an odd head": ("llama", {"head_dim": 15}, "head_dim is 15; rotary positions need an even number"),
    "experts per token": ("qwen3_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7; there are only 6"),
    "dense layers": ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers is 1; expected a list"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_built_is_refused_by_its_field(name: str) -> None:
    kind, changes, message = REFUSED[name]
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{message}"):
        read(kind, **changes)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen2", {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 2}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 256, "max_window_layers": 0}),
        ("qwen3", {"layer_types": ["full_attention"] * 3, "use_sliding_window": True, "sliding_window": 64}),
        ("mistral", {"sliding_window": 256}),
        ("llama", {"mlp_bias": None, "partial_rotary_factor": 1, "hidden_act": "swish", "rope_scaling": None}),
    ],
)
def test_what_changes_nothing_is_taken(kind: str, changes: dict[str, Any]) -> None:
    assert read(kind, **changes).rope_scaling is None


# ---------------------------------------------------------------------- generation_config.json


def profile_of(folder: Path) -> ModelProfile:
    loaded = load(resolve(RuntimeConfig(model_path=folder, device="cpu")), "cpu", torch.float32)
    return find_family(loaded.family).profile(loaded)


def test_end_ids_and_defaults_come_from_the_file_beside_the_config(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "llama", eos_token_id=STOP)
    assert (profile_of(folder).stop_ids, profile_of(folder).defaults) == ((STOP,), NEUTRAL)
    asked = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    content = {"eos_token_id": [END_OF_TURN, STOP], "max_length": 4096, "transformers_version": "4.37.0", **asked}
    (folder / "generation_config.json").write_text(json.dumps(content))
    profile = profile_of(folder)
    assert profile.stop_ids == (END_OF_TURN, STOP)
    skill = default_registry().get("complete")
    found = skill.parse({"prompt": "hey"}, profile).sampling
    assert (found.temperature, found.top_p, found.top_k, found.repetition_penalty) == (0.7, 0.8, 20, 1.05)
    own = skill.parse({"prompt": "hey", "temperature": 0.0, "repetition_penalty": 1.0}, profile).sampling
    assert (own.temperature, own.top_p, own.top_k, own.repetition_penalty) == (0.0, 0.8, 20, 1.0)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"bos_token_id": 1, "pad_token_id": 0, "_from_model_config": True}, NEUTRAL),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, SkillDefaults(temperature=0.0, top_p=0.9)),
        ({"do_sample": True}, SkillDefaults(temperature=1.0, top_p=1.0)),
        ({"temperature": 0.6, "top_k": None}, SkillDefaults(temperature=0.6, top_p=1.0)),
        ({"min_p": 0.1, "do_sample": True}, SkillDefaults(temperature=1.0, top_p=1.0, min_p=0.1)),
    ],
)
def test_what_the_file_does_not_name_has_no_effect(generation: dict[str, Any], expected: SkillDefaults) -> None:
    assert read("llama", generation).defaults == expected


def test_one_end_id_or_several_go_before_those_of_the_config() -> None:
    assert read("llama", {"eos_token_id": 9}).stop_ids == (9,)
    assert read("llama", {"eos_token_id": [9, 8]}).stop_ids == (9, 8)
    assert read("llama", {"eos_token_id": None}).stop_ids == (STOP, END_OF_TURN)


@pytest.mark.parametrize("given", [STOP, None])
def test_the_end_that_the_tokenizer_names_is_one_more(given: int | None, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "llama", eos_token_id=given)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|eot|>"}}))
    assert profile_of(folder).stop_ids == ((END_OF_TURN,) if given is None else (STOP, END_OF_TURN))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END_OF_TURN}))
    assert profile_of(folder).stop_ids == (END_OF_TURN,)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "no such token"}))
    assert profile_of(folder).stop_ids == (END_OF_TURN,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"temperature": -1}',
            r"generation_config\.json: temperature: must be a number from 0 to 2 \(got -1\); correct",
        ),
        ('{"eos_token_id": "two"}', r"generation_config\.json: eos_token_id is 'two'; expected a token id"),
        ("{", r"generation_config\.json is not valid JSON"),
        ("[]", r"generation_config\.json must hold a JSON object"),
    ],
)
def test_a_broken_file_is_refused_by_name(text: str, message: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "llama")
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        profile_of(folder)
