"""The skills every engine offers unless it is given others."""

from __future__ import annotations

from typing import Any

from kestrel.skills.base import SkillRegistry, SkillSpec
from kestrel.skills.caption import CaptionSkill
from kestrel.skills.chat import ChatSkill
from kestrel.skills.complete import CompleteSkill
from kestrel.skills.detect import DetectSkill
from kestrel.skills.embed import EmbedSkill
from kestrel.skills.fields import DrawSeed, random_seed
from kestrel.skills.point import PointSkill
from kestrel.skills.query import QuerySkill
from kestrel.skills.segment import SegmentSkill

_SKILLS = (QuerySkill, CaptionSkill, PointSkill, DetectSkill, SegmentSkill, ChatSkill, CompleteSkill, EmbedSkill)


def default_skills(draw_seed: DrawSeed = random_seed) -> list[SkillSpec[Any]]:
    """All built-in skills. `draw_seed` gives the seed of a request that has none and a temperature above 0."""
    return [skill(draw_seed) for skill in _SKILLS]


def default_registry(draw_seed: DrawSeed = random_seed) -> SkillRegistry:
    return SkillRegistry(default_skills(draw_seed))
