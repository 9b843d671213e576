"""Reading configs strictly, and the built-in ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from kestrel.errors import CheckpointError
from kestrel.moondream.config import MOONDREAM2, MOONDREAM3, MOONDREAM_0_5B, MoondreamConfig
from kestrel.moondream.model import MoondreamModel
from kestrel.skills.base import Template

from .goldens import FAMILIES, config_dict

RELEASES = {"moondream2": MOONDREAM2, "moondream3": MOONDREAM3, "moondream-0.5b": MOONDREAM_0_5B}


def altered(path: str, value: Any, family: str = "md3") -> dict[str, Any]:
    """A golden config with one value set (or, with `...`, removed)."""
    data = config_dict(family)
    *parents, key = path.split(".")
    section = data
    for parent in parents:
        section = section.setdefault(parent, {})
    if value is ...:
        del section[key]
    else:
        section[key] = value
    return data


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_survives_a_round_trip_through_json(family: str) -> None:
    config = MoondreamConfig.from_dict(config_dict(family))
    assert MoondreamConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("config", RELEASES.values(), ids=RELEASES.keys())
def test_a_release_survives_a_round_trip_through_json(config: MoondreamConfig) -> None:
    assert MoondreamConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("name", "num_parameters", "num_tensors"),
    [
        ("moondream2", 1_927_237_104, 592),
        ("moondream3", 9_268_622_832, 660),
        ("moondream-0.5b", 631_889_382, 592),
    ],
)
def test_a_release_has_the_published_number_of_parameters(name: str, num_parameters: int, num_tensors: int) -> None:
    with torch.device("meta"):
        model = MoondreamModel(RELEASES[name])
    assert sum(p.numel() for p in model.parameters()) == num_parameters
    assert len(model.state_dict()) == num_tensors


def test_a_region_layernorm_adds_two_tensors() -> None:
    with torch.device("meta"):
        state = MoondreamModel(MOONDREAM3.with_region_ln(True)).state_dict()
    assert len(state) == 662
    assert {"region.ln.weight", "region.ln.bias"} <= state.keys()


@pytest.mark.parametrize(
    "path",
    [
        "text.dim",
        "text.prefix_attn",
        "text.moe.start_layer",
        "vision.crop_size",
        "region.coord_out_dim",
        "tokenizer.coord_id",
        "tokenizer.templates",
        "tokenizer.templates.query.suffix",
        "tokenizer",
    ],
)
def test_a_missing_key_is_named(path: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{path} is missing"):
        MoondreamConfig.from_dict(altered(path, ...))


@pytest.mark.parametrize(
    "path",
    [
        "surprise",
        "text.group_size",
        "text.moe.shared_experts",
        "vision.enc_layers",
        "region.outer_dim",
        "tokenizer.pad_id",
        "tokenizer.templates.gaze",
        "tokenizer.templates.caption.epic",
        "tokenizer.templates.query.infix",
        "generation.style",
        "generation.defaults.num_beams",
    ],
)
def test_an_unknown_key_is_named(path: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{path} is unknown"):
        MoondreamConfig.from_dict(altered(path, 1))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("text", [1]),
        ("text.dim", 0),
        ("text.dim", "128"),
        ("text.dim", True),
        ("text.dim", 128.0),
        ("text.rope_theta", -1.0),
        ("text.tau_attn", 1),
        ("text.moe", 8),
        ("region.inner_dim", 0),
        ("tokenizer.bos_id", -1),
        ("tokenizer.templates.query.prefix", [1, "2"]),
        ("tokenizer.templates.caption.short", 3),
        ("generation.query_answer_opener", None),
        ("generation.compares_coord_and_eos_only", 0),
        ("generation.defaults.top_p", 0),
        ("generation.picture_question", " "),
        ("generation.picture_question", 5),
    ],
)
def test_a_value_of_a_wrong_type_is_named(path: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"{path} must be"):
        MoondreamConfig.from_dict(altered(path, value))


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("text.n_heads", 3, "text.n_heads"),
        ("text.n_kv_heads", 1, "text.n_kv_heads"),
        ("text.rotary_dim", 31, "text.rotary_dim"),
        ("text.rotary_dim", 66, "text.rotary_dim"),
        ("text.moe.experts_per_token", 9, "experts_per_token"),
        ("text.prefix_attn", 729, "text.prefix_attn"),
        ("vision.enc_n_heads", 3, "vision.enc_n_heads"),
        ("vision.in_channels", 1, "vision.in_channels"),
        ("vision.overlap_margin", 14, "vision.overlap_margin"),
        ("vision.proj_out_dim", 64, "vision.proj_out_dim"),
        ("region.dim", 64, "region.dim"),
        ("region.size_feat_dim", 63, "region.size_feat_dim"),
        ("tokenizer.coord_id", 320, "tokenizer.coord_id"),
        ("tokenizer.templates.point.suffix", [999], "tokenizer.templates.point"),
        ("generation.query_reasoning_opener", [400], "generation.query_reasoning_opener"),
    ],
)
def test_fields_that_contradict_each_other_are_named(path: str, value: Any, named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        MoondreamConfig.from_dict(altered(path, value))


def test_a_patch_size_must_divide_the_crop() -> None:
    with pytest.raises(CheckpointError, match=r"vision\.enc_patch_size 16 must divide"):
        MoondreamConfig.from_dict(
            altered("vision.enc_patch_size", 16) | {"text": altered("text.prefix_attn", 530)["text"]}
        )


def test_absent_keys_take_their_documented_values() -> None:
    data = altered("text.n_kv_heads", ..., family="md2")
    del data["region"]["inner_dim"]
    config = MoondreamConfig.from_dict(data)
    assert config.text.n_kv_heads == config.text.n_heads
    assert (config.text.rope_theta, config.text.rotary_dim, config.text.tau_attn, config.text.moe) == (
        10000.0,
        32,
        False,
        None,
    )
    assert config.region.inner_dim is None
    assert config.region.has_ln is False


def test_tau_attention_decides_how_a_silent_config_is_prompted() -> None:
    two, three = (MoondreamConfig.from_dict(config_dict(family)).generation for family in FAMILIES)
    assert (two.query_answer_opener, two.query_reasoning_opener) == ((3, 3), (3, 4))
    assert (three.query_answer_opener, three.query_reasoning_opener) == ((3,), (4,))
    assert (two.compares_coord_and_eos_only, three.compares_coord_and_eos_only) == (False, True)
    assert (two.defaults.top_p, two.defaults.max_objects, two.defaults.reasoning) == (0.3, 50, False)
    assert (three.defaults.top_p, three.defaults.max_objects, three.defaults.reasoning) == (0.9, 150, True)


def test_a_config_that_speaks_for_itself_is_believed() -> None:
    data = config_dict("md2")
    data["generation"] = {"query_answer_opener": [3], "defaults": {"temperature": 0.0}}
    generation = MoondreamConfig.from_dict(data).generation
    assert generation.query_answer_opener == (3,)
    assert generation.query_reasoning_opener == (3, 4)
    assert generation.defaults.temperature == 0.0
    assert generation.defaults.top_p == 0.3
    assert generation.picture_question == "Describe this image."
    data["generation"]["picture_question"] = "What is there?"
    spoken = MoondreamConfig.from_dict(data)
    assert spoken.generation.picture_question == "What is there?"
    assert MoondreamConfig.from_dict(spoken.to_dict()) == spoken


def test_a_null_template_is_an_unsupported_skill() -> None:
    config = MoondreamConfig.from_dict(altered("tokenizer.templates.query", None))
    assert "query" not in config.tokenizer.templates
    assert config.generation.query_answer_opener == ()
    assert config.generation.query_reasoning_opener == ()
    assert config.generation.defaults.reasoning is False


def test_releases_carry_their_prompts() -> None:
    assert MOONDREAM2.generation.query_answer_opener == (3, 3)
    assert MOONDREAM3.generation.query_answer_opener == (3,)
    assert MOONDREAM3.tokenizer.templates["segment"] == Template((1, 17374, 2), (3,))
    assert "segment" not in MOONDREAM2.tokenizer.templates
    assert MOONDREAM_0_5B.generation.query_answer_opener == (198, 198, 33706, 25)
    assert MOONDREAM_0_5B.generation.query_reasoning_opener == ()
    assert "caption.long" not in MOONDREAM_0_5B.tokenizer.templates
