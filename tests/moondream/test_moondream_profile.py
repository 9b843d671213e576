"""What skills see of each model generation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kestrel.models.tokenizer import TextTokenizer
from kestrel.moondream.config import MOONDREAM2, MOONDREAM3, MOONDREAM_0_5B, MoondreamConfig
from kestrel.moondream.prompts import moondream_profile
from kestrel.skills.base import RegionIds, SkillDefaults, Template

from .weight_sets import ROOT, golden_config

TOKENIZER = TextTokenizer.from_file(ROOT / "md2" / "tokenizer.json")
CAPTIONS = {"caption.short", "caption.normal", "caption.long"}


@pytest.mark.parametrize(
    ("config", "answer", "reasoning", "pair_only", "defaults"),
    [
        (MOONDREAM2, (3, 3), (3, 4), False, SkillDefaults(0.5, 0.3, 768, 50, False)),
        (MOONDREAM3, (3,), (4,), True, SkillDefaults(0.5, 0.9, 768, 150, True)),
        (MOONDREAM_0_5B, (198, 198, 33706, 25), (), False, SkillDefaults(0.5, 0.3, 768, 50, False)),
        (golden_config("md2"), (3, 3), (3, 4), False, SkillDefaults(0.5, 0.3, 768, 50, False)),
        (golden_config("md3"), (3,), (4,), True, SkillDefaults(0.5, 0.9, 768, 150, True)),
    ],
)
def test_openers_comparison_and_defaults_follow_the_generation(
    config: MoondreamConfig,
    answer: tuple[int, ...],
    reasoning: tuple[int, ...],
    pair_only: bool,
    defaults: SkillDefaults,
) -> None:
    profile = moondream_profile(config, TOKENIZER, "some-name")
    assert (profile.answer_opener, profile.reasoning_opener) == (answer, reasoning)
    assert profile.compares_coord_and_eos_only == pair_only
    assert profile.defaults == defaults
    assert profile.name == "some-name"
    assert profile.tokenizer is TOKENIZER


def test_ids_are_those_of_the_config() -> None:
    profile = moondream_profile(MOONDREAM3, TOKENIZER, "m")
    assert (profile.bos, profile.stop_ids, profile.answer_id) == (0, (0,), 3)
    assert profile.regions == RegionIds(5, 6, 7, 9)


def test_only_the_real_moondream_3_offers_segment() -> None:
    real = moondream_profile(MOONDREAM3, TOKENIZER, "m").templates
    assert real["segment"] == Template((1, 17374, 2), (3,))
    assert real.keys() == CAPTIONS | {"query", "detect", "point", "segment"}
    for config in (MOONDREAM2, golden_config("md2"), golden_config("md3")):
        assert moondream_profile(config, TOKENIZER, "m").templates.keys() == real.keys() - {"segment"}


def test_a_tiny_model_offers_segment_when_its_config_has_the_template() -> None:
    config = golden_config("md3")
    template = Template((1, 300, 2), (3,))
    ids = replace(config.tokenizer, templates={**config.tokenizer.templates, "segment": template})
    assert moondream_profile(replace(config, tokenizer=ids), TOKENIZER, "m").templates["segment"] == template
