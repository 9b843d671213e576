"""From a parsed request and its pictures to what the scheduler runs."""

from __future__ import annotations

from typing import Any

from kestrel.engine.intake import require_runnable
from kestrel.engine.refinement import RefinedSegment
from kestrel.families import ReadyModel
from kestrel.images.recent import Picture
from kestrel.request import GenerationRequest, TokenConsumer
from kestrel.skills.base import SkillRequest, SkillSpec
from kestrel.tokens import ImageSpan


def generation_request(
    ready: ReadyModel, skill: SkillSpec[Any], request: SkillRequest, images: list[Picture], request_id: str
) -> GenerationRequest:
    """The skill lays out its prompt; what it asks for is checked before it can reach the device."""
    spans = [ImageSpan(image.digest, ready.num_image_positions) for image in images]
    prompt = skill.prompt(request, spans, ready.profile)
    require_runnable(prompt, spans, ready.vocab_size)
    consumer: TokenConsumer = skill.start(request, ready.profile)
    if skill.yields_outline and ready.refiner is not None and images and images[0].outline is not None:
        consumer = RefinedSegment(consumer, ready.refiner, images[0].outline)
    return GenerationRequest(
        request_id=request_id,
        items=prompt.items,
        grammar=prompt.grammar,
        sampling=prompt.sampling,
        consumer=consumer,
        images={image.digest: image for image in images},
        prompt_outputs=prompt.outputs,
        constraint=prompt.constraint,
    )
