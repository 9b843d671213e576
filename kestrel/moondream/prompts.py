"""What the skills may know about a loaded Moondream."""

from __future__ import annotations

from kestrel.moondream.config import MoondreamConfig
from kestrel.skills.base import ConstraintSource, ModelProfile, SpecialIds, Tokenizer


def moondream_profile(
    config: MoondreamConfig, tokenizer: Tokenizer, name: str, constraints: ConstraintSource | None = None
) -> ModelProfile:
    """Ids, templates, openers and defaults, all of them from the config. A skill without a template is not offered."""
    ids = config.tokenizer
    generation = config.generation
    return ModelProfile(
        name=name,
        ids=SpecialIds(
            bos=ids.bos_id,
            eos=ids.eos_id,
            answer=ids.answer_id,
            thinking=ids.thinking_id,
            coord=ids.coord_id,
            size=ids.size_id,
            start_ground=ids.start_ground_points_id,
            end_ground=ids.end_ground_id,
        ),
        templates=ids.templates,
        answer_opener=generation.query_answer_opener,
        reasoning_opener=generation.query_reasoning_opener,
        compares_coord_and_eos_only=generation.compares_coord_and_eos_only,
        defaults=generation.defaults,
        tokenizer=tokenizer,
        constraints=constraints,
    )
