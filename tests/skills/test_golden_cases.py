"""Prompts, grammars and states together reproduce the reference's outputs from the reference's samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kestrel.grammar import State
from kestrel.skills import default_registry
from kestrel.skills.base import ModelProfile, Prompt, SkillRegistry
from kestrel.tokens import CoordToken, ImageSpan, SizeToken, TextToken
from tests.places import bare

from .machine import Choose, Decoder, feed, in_order
from .model_profiles import IMAGE_POSITIONS, golden_cases, golden_logits, golden_profile

FIELDS = ("question", "object", "length", "spatial_refs")
CASES = [(model, name) for model in ("md2", "md3") for name in golden_cases(model)["cases"]]


def skill_of(name: str) -> str:
    kind = name.removeprefix("lora_").removeprefix("forced_").split("_")[0]
    return "query" if kind == "reasoning" else kind


def fields_of(case: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {name: case[name] for name in FIELDS if name in case}
    fields["settings"] = case.get("settings", {"temperature": 0, "max_tokens": 100})
    if case["image"] is not None:
        fields["image"] = case["image"]
    if "question" in case:
        fields["reasoning"] = case.get("reasoning", False)
    return fields


def flat_ids(prompt: Prompt, profile: ModelProfile) -> list[int]:
    typed = {CoordToken: profile.regions.coord, SizeToken: profile.regions.size}
    tokens = [item for item in prompt.items if not isinstance(item, ImageSpan)]
    return [item.id if isinstance(item, TextToken) else typed[type(item)] for item in tokens]


def samples_of(model: str, name: str) -> Choose:
    """The most likely id that the grammar's state lets through, from the reference's own logits; or forced ids."""
    case = golden_cases(model)["cases"][name]
    if "forced_tokens" in case:
        return in_order(case["forced_tokens"])
    logits = golden_logits(model)[f"{name}.logits"]

    def choose(state: State, step: int) -> int:
        row = logits[step].copy()
        row[list(state.suppressed)] = -np.inf
        if state.allowed is not None:
            row[[i for i in range(len(row)) if i not in state.allowed]] = -np.inf
        return int(row.argmax())

    return choose


def assert_same(ours: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert ours.keys() == expected.keys()
        for key in expected:
            assert_same(ours[key], expected[key])
    elif isinstance(expected, list):
        assert len(ours) == len(expected)
        for left, right in zip(ours, expected, strict=True):
            assert_same(left, right)
    elif isinstance(expected, float):
        assert ours == pytest.approx(expected, abs=2e-6)
    else:
        assert ours == expected


@pytest.fixture(scope="module")
def registry() -> SkillRegistry:
    return default_registry()


@pytest.mark.parametrize(("model", "name"), CASES)
def test_prompt_equals_the_reference(model: str, name: str, registry: SkillRegistry) -> None:
    case = golden_cases(model)["cases"][name]
    profile = golden_profile(model)
    skill = registry.get(skill_of(name))
    request = skill.parse(fields_of(case), profile)
    assert request.images == (() if case["image"] is None else (case["image"],))
    spans = [ImageSpan("digest", IMAGE_POSITIONS) for _ in request.images]
    prompt = skill.prompt(request, spans, profile)
    if spans:
        assert prompt.items[0] == ImageSpan("digest", IMAGE_POSITIONS + 1, bos_id=profile.bos)
    assert flat_ids(prompt, profile) == case["steps"][0]["tokens"]


@pytest.mark.parametrize(("model", "name"), CASES)
def test_output_equals_the_reference(model: str, name: str, registry: SkillRegistry) -> None:
    case = golden_cases(model)["cases"][name]
    profile = golden_profile(model, case.get("tokenizer_overrides"))
    skill = registry.get(skill_of(name))
    request = skill.parse(fields_of(case), profile)
    prompt = skill.prompt(request, [ImageSpan("digest", IMAGE_POSITIONS) for _ in request.images], profile)
    coords = (bin_ / 1024 for bin_ in case.get("coord_bins", ()))
    sizes = (tuple(2 ** (10 * bin_ / 1023 - 10) for bin_ in pair) for pair in case.get("size_bins", ()))
    decoder = Decoder(profile.regions, prompt.grammar, prompt.sampling, coords, sizes)  # pyright: ignore[reportArgumentType]
    output, deltas = feed(skill.start(request, profile), decoder.run(samples_of(model, name)))
    assert_same(bare(output.fields), case["output"])
    assert not list(coords), "every decoded bin belongs to a token"
    assert not list(sizes)
    assert_streams_as_returned(output.fields, deltas)


def assert_streams_as_returned(fields: dict[str, Any], deltas: list[Any]) -> None:
    text = "".join(delta.text for delta in deltas if delta.kind == "text")
    thoughts = "".join(delta.text for delta in deltas if delta.kind == "reasoning")
    events = [dict(delta.data) for delta in deltas if delta.kind in ("point", "object")]
    assert text == fields.get("answer", fields.get("caption", ""))
    assert thoughts == fields.get("reasoning", {}).get("text", "")
    assert events == fields.get("points", fields.get("objects", []))


def test_spatial_references_carry_their_values(md2: ModelProfile, registry: SkillRegistry) -> None:
    case = golden_cases("md2")["cases"]["query_spatial_refs_multi"]
    skill = registry.get("query")
    request = skill.parse(fields_of(case), md2)
    items = skill.prompt(request, [ImageSpan("digest", IMAGE_POSITIONS)], md2).items
    assert list(items[4:9]) == [
        CoordToken(0.25),
        CoordToken(0.75),
        CoordToken(0.3125),
        CoordToken(0.5625),
        SizeToken(0.375, 0.625),
    ]
