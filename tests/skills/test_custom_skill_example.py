"""The example of a user's own skill works through the public contract."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from kestrel.errors import RequestError
from kestrel.request import FinishReason, TokenLogprobs
from kestrel.skills import SkillRegistry, default_skills
from kestrel.skills.base import ModelProfile
from kestrel.tokens import ImageSpan, TextToken

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_skill.py"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example's module, loaded without an engine behind it."""
    monkeypatch.setitem(sys.modules, "kestrel.engine", SimpleNamespace(InferenceEngine=object))
    spec = importlib.util.spec_from_file_location("custom_skill", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "custom_skill", module)
    spec.loader.exec_module(module)
    return module


def test_only_yes_and_no_can_be_sampled(example: ModuleType, md2: ModelProfile) -> None:
    skill = SkillRegistry([*default_skills(), example.YesNoSkill()]).get("yes_no")
    request = skill.parse({"image": b"picture", "question": "a dog?"}, md2)
    prompt = skill.prompt(request, [ImageSpan("digest", 729)], md2)
    allowed = prompt.grammar.states[0].allowed
    assert allowed is not None
    assert {md2.tokenizer.decode([i]) for i in allowed} == {"y", "Y", "n", "N"}
    assert prompt.items[0] == ImageSpan("digest", 730, bos_id=md2.bos)


def test_the_probability_is_the_share_among_yes_and_no(example: ModuleType, md2: ModelProfile) -> None:
    yes, no, other = (md2.tokenizer.encode(letter)[0] for letter in "yno")
    skill = example.YesNoSkill()
    state = skill.start(skill.parse({"image": b"picture", "question": "a dog?"}, md2), md2)
    top = ((other, math.log(0.6)), (yes, math.log(0.3)), (no, math.log(0.1)))
    assert state.consume(TextToken(yes), TokenLogprobs(math.log(0.3), top)) is None
    output = state.finish(FinishReason.LENGTH)
    assert output.fields == {"answer": True, "probability": pytest.approx(0.75)}
    assert output.text == "yes"


def test_other_fields_are_refused(example: ModuleType, md2: ModelProfile) -> None:
    with pytest.raises(RequestError, match="nothing else"):
        example.YesNoSkill().parse({"image": b"picture", "question": "a dog?", "temperature": 1}, md2)
