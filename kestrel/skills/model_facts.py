"""What the configuration of a model says to skills, as plain data: lists of models read no more of this room."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Template:
    """Ids around the user's words."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SkillDefaults:
    """What a request gets when it does not say otherwise; differs per model generation."""

    temperature: float = 0.5
    top_p: float = 0.9
    max_new_tokens: int = 768
    max_objects: int = 150
    reasoning: bool = False
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
