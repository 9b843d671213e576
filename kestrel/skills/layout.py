"""How a request becomes context items: the opening, the skill's template, the user's words."""

from __future__ import annotations

from collections.abc import Sequence

from kestrel.errors import RequestError
from kestrel.grammar import Grammar
from kestrel.request import Constraint
from kestrel.sampling_params import SamplingParams
from kestrel.skills.base import ModelProfile, Prompt, Template
from kestrel.skills.decode_rules import require_choices
from kestrel.skills.spatial import SpatialRef, spatial_tokens
from kestrel.tokens import ContextItem, ImageSpan, TextToken, text_tokens


def opening(profile: ModelProfile, images: Sequence[ImageSpan]) -> list[ContextItem]:
    """The beginning-of-text token and the pictures that follow it; the first picture takes the token into its span."""
    bos = profile.ids.bos
    if not images:
        return [TextToken(bos)]
    first = ImageSpan(images[0].digest, images[0].num_positions + 1, bos_id=bos)
    return [first, *images[1:]]


def block(
    profile: ModelProfile, prefix: Sequence[int], refs: Sequence[SpatialRef], text: str, suffix: Sequence[int]
) -> list[ContextItem]:
    """Template ids around spatial references and text."""
    words = text_tokens(profile.tokenizer.encode(text))
    return [*text_tokens(prefix), *spatial_tokens(refs), *words, *text_tokens(suffix)]


def laid_out(
    items: Sequence[ContextItem], grammar: Grammar, sampling: SamplingParams, constraint: Constraint | None = None
) -> Prompt:
    require_choices(grammar, sampling)
    return Prompt(tuple(items), grammar, sampling, constraint=constraint)


def template_of(profile: ModelProfile, skill: str) -> Template:
    if skill not in profile.templates:
        raise not_supported(profile, skill)
    return profile.templates[skill]


def not_supported(profile: ModelProfile, skill: str) -> RequestError:
    supported = ", ".join(sorted({key.split(".")[0] for key in profile.templates})) or "complete"
    return RequestError("skill", f"{skill} is not supported by {profile.name}; use one of: {supported}")


def check_pictures(profile: ModelProfile, images: Sequence[object], *, needed_by: str | None = None) -> None:
    """Refuse pictures the model cannot read, and the lack of one that `needed_by` cannot do without."""
    if images and not profile.has_vision:
        raise RequestError("image", f"{profile.name} reads no pictures; leave the image out or use another model")
    if needed_by is not None and not images:
        raise RequestError("image", f"is required: {needed_by} needs a picture")


def opens_reasoning(profile: ModelProfile, asked: bool | None) -> bool:
    """Whether to think first: as asked, else the model's habit."""
    if asked is None:
        return profile.defaults.reasoning and bool(profile.reasoning_opener)
    if asked and not profile.reasoning_opener:
        raise RequestError("reasoning", f"is not supported by {profile.name}; leave it out or use another model")
    return asked
