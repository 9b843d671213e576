"""How a request becomes context items: the opening, the skill's template, the user's words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from kestrel.errors import RequestError, shown
from kestrel.grammar import Grammar
from kestrel.request import Constraint
from kestrel.sampling_params import SamplingParams
from kestrel.settings import is_number
from kestrel.skills.base import ModelProfile, Prompt, Template
from kestrel.skills.decode_rules import require_choices
from kestrel.tokens import ContextItem, CoordToken, ImageSpan, SizeToken, TextToken, text_tokens

SpatialRef: TypeAlias = tuple[float, ...]
"""(x, y) or (x_min, y_min, x_max, y_max), all from 0 to 1."""


def opening(profile: ModelProfile, images: Sequence[ImageSpan]) -> list[ContextItem]:
    """The beginning-of-text token and the pictures that follow it; the first picture takes the token into its span."""
    bos = profile.bos
    if bos is None:
        return list(images)
    if not images:
        return [TextToken(bos)]
    first = ImageSpan(images[0].digest, images[0].num_positions + 1, bos_id=bos)
    return [first, *images[1:]]


def block(
    profile: ModelProfile, prefix: Sequence[int], refs: Sequence[SpatialRef], text: str, suffix: Sequence[int]
) -> list[ContextItem]:
    """Template ids around spatial references and text."""
    words = text_tokens(profile.tokenizer.encode(text))
    return [*text_tokens(prefix), *_spatial_tokens(refs), *words, *text_tokens(suffix)]


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
    skills = {key.split(".")[0] for key in profile.templates} | ({"chat"} if profile.chat is not None else set())
    supported = ", ".join(sorted(skills | {"complete", "embed"}))
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
        return profile.defaults.reasoning and profile.can_reason
    if asked and not profile.can_reason:
        raise RequestError("reasoning", f"is not supported by {profile.name}; leave it out or use another model")
    return asked


def spatial_refs(name: str, value: Any) -> tuple[SpatialRef, ...]:
    """Checked references; an error names the entry, as in spatial_refs[2]."""
    if not isinstance(value, (list, tuple)):
        raise RequestError(
            name, f"must be a list of points [x, y] and boxes [x_min, y_min, x_max, y_max] (got {shown(value)})"
        )
    return tuple(_spatial_ref(f"{name}[{index}]", ref) for index, ref in enumerate(value))


def _spatial_tokens(refs: Iterable[SpatialRef]) -> list[ContextItem]:
    """A point is its two coordinates; a box is its centre's two coordinates and its size."""
    items: list[ContextItem] = []
    for ref in refs:
        if len(ref) == 2:
            items += [CoordToken(ref[0]), CoordToken(ref[1])]
        else:
            x_min, y_min, x_max, y_max = ref
            items += [CoordToken((x_min + x_max) / 2), CoordToken((y_min + y_max) / 2)]
            items.append(SizeToken(x_max - x_min, y_max - y_min))
    return items


def _spatial_ref(name: str, ref: Any) -> SpatialRef:
    if not isinstance(ref, (list, tuple)) or len(ref) not in (2, 4):
        raise RequestError(name, f"must be [x, y] or [x_min, y_min, x_max, y_max] (got {shown(ref)})")
    for value in ref:
        if not is_number(value) or not 0.0 <= value <= 1.0:
            raise RequestError(name, f"must hold numbers from 0 to 1, as shares of the picture (got {shown(value)})")
    if len(ref) == 4 and (ref[0] > ref[2] or ref[1] > ref[3]):
        raise RequestError(name, f"must have x_min ≤ x_max and y_min ≤ y_max (got {shown(ref)})")
    return tuple(float(value) for value in ref)
