"""What turns a request into ids: tokenizer, control ids and templates, as plain data that can cross to a process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Tokenizer as TokenizerJson

from kestrel.models.tokenizer import TextTokenizer
from kestrel.skills.base import ModelProfile, SkillDefaults, SpecialIds, Template


@dataclass(frozen=True)
class PromptFormat:
    tokenizer_json: str
    ids: SpecialIds
    templates: Mapping[str, Template]
    """By skill, as in `ModelProfile`."""

    def profile(self) -> ModelProfile:
        """A Moondream 3 as the skills see it: one answer suffix or one thinking id opens what the model says."""
        return ModelProfile(
            name="training",
            ids=self.ids,
            templates=dict(self.templates),
            answer_opener=self.templates["query"].suffix,
            reasoning_opener=(self.ids.thinking,),
            compares_coord_and_eos_only=True,
            defaults=SkillDefaults(),
            tokenizer=TextTokenizer(TokenizerJson.from_str(self.tokenizer_json)),
        )
