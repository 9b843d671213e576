"""What the built-in skills share beyond the contract: how a request becomes context items, sampling, answer formats,
and objects named in words.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, TypeVar

from kestrel.errors import RequestError, shown
from kestrel.grammar import Grammar
from kestrel.request import Constraint
from kestrel.settings import SamplingParams, is_number
from kestrel.skills.base import ModelProfile, Prompt, SkillRequest, SkillSpec
from kestrel.skills.decode_rules import require_choices
from kestrel.skills.fields import DrawSeed, FieldTable, Values, random_seed
from kestrel.skills.model_facts import Template
from kestrel.tokens import ContextItem, CoordToken, ImageSpan, SizeToken, Text, TextToken

WITH_PICTURES = "moondream2"
"""A registered model, named to those who ask a text model about pictures."""
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
    words = Text(profile.tokenizer.encode(text))
    return [*Text(prefix), *_spatial_tokens(refs), *words, *Text(suffix)]


def laid_out(
    items: Sequence[ContextItem], grammar: Grammar, sampling: SamplingParams, constraint: Constraint | None = None
) -> Prompt:
    require_choices(grammar, sampling)
    fixed = items if isinstance(items, Text) else tuple(items)
    return Prompt(fixed, grammar, sampling, constraint=constraint)


def template_of(profile: ModelProfile, skill: str) -> Template:
    if skill not in profile.templates:
        raise not_supported(profile, skill)
    return profile.templates[skill]


def supported_skills(profile: ModelProfile) -> set[str]:
    skills = {key.split(".")[0] for key in profile.templates} | {"complete", "embed"}
    return skills if profile.chat is None else skills | {"chat"}


def not_supported(profile: ModelProfile, skill: str, *, hidden: Collection[str] = ()) -> RequestError:
    """`hidden`: skills that are not offered where this is said."""
    supported = ", ".join(sorted(supported_skills(profile).difference(hidden)))
    remedy = ""
    if skill == "chat":
        remedy = ", or give the model a chat template with --chat-template FILE"
    elif not profile.has_vision:
        remedy = f", or a model that reads pictures, such as {WITH_PICTURES}"
    return RequestError("skill", f"{skill} is not supported by {profile.name}; use one of: {supported}{remedy}")


def check_pictures(profile: ModelProfile, images: Sequence[object], *, needed_by: str | None = None) -> None:
    """Refuse pictures the model cannot read, and the lack of one that `needed_by` cannot do without."""
    if images and not profile.has_vision:
        raise reads_no_pictures("image", profile)
    if needed_by is not None and not images:
        raise RequestError("image", f"is required: {needed_by} needs a picture")


def reads_no_pictures(name: str, profile: ModelProfile) -> RequestError:
    remedy = f"leave the picture out, or use a model that does, such as {WITH_PICTURES}"
    return RequestError(name, f"{profile.name} reads no pictures; {remedy}")


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


# ---------------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRequest(SkillRequest):
    sampling: SamplingParams


SampledT = TypeVar("SampledT", bound=SampledRequest)


class BuiltinSkill(SkillSpec[SampledT]):
    def __init__(self, draw_seed: DrawSeed = random_seed) -> None:
        self._draw_seed = draw_seed

    def text_sampling(self, values: Values, profile: ModelProfile) -> SamplingParams:
        """Free text: as the model's own defaults say unless the request does."""
        defaults = profile.defaults
        return values.sampling(
            temperature=defaults.temperature,
            top_p=defaults.top_p,
            max_new_tokens=defaults.max_new_tokens,
            draw_seed=self._draw_seed,
            top_k=defaults.top_k,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
        )

    def greedy_sampling(self, values: Values, max_new_tokens: int) -> SamplingParams:
        """Structured output: the most likely token unless the request says otherwise."""
        return values.sampling(temperature=0.0, top_p=1.0, max_new_tokens=max_new_tokens, draw_seed=self._draw_seed)


def answer_constraint(request: SampledRequest, grammar: Grammar, profile: ModelProfile) -> Constraint | None:
    """What `response_format` asks for. It holds in the last phase of the grammar, so thinking stays free."""
    if request.response_format is None:
        return None
    field = request.response_format.field
    if profile.constraints is None:
        raise RequestError(field, f"is not supported by {profile.name}; leave it out or use another model")
    if request.sampling.allowed_ids or request.sampling.suppressed_ids:
        remedy = "the two can leave no token at all; give one of them"
        raise RequestError(
            field, f"cannot be used together with allowed_ids (allowed_token_ids) or suppressed_ids: {remedy}"
        )
    answer_phase = max(state.phase for state in grammar.states)
    return Constraint(profile.constraints.start(request.response_format), answer_phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRequest(SampledRequest):
    object: str
    max_objects: int
    spatial_refs: tuple[SpatialRef, ...] = ()


class ObjectSkill(BuiltinSkill[ObjectRequest]):
    """Point and detect: an object named in words, a bound on how many are found, greedy decoding.

    The bound is `max_objects`; each object takes a fixed number of tokens. A temperature above 0 applies to the choice
    between one more object and the end, while coordinates and sizes are always the most likely ones.
    """

    finds_places = True
    field_table: ClassVar[FieldTable]
    tokens_per_object: ClassVar[int]

    @abstractmethod
    def rules(self, profile: ModelProfile) -> Grammar:
        """How objects are written."""

    def parse(self, fields: Mapping[str, Any], profile: ModelProfile) -> ObjectRequest:
        template_of(profile, self.name)
        values = self.field_table.read(fields)
        check_pictures(profile, values.images, needed_by=self.name)
        max_objects = values.settings.get("max_objects", profile.defaults.max_objects)
        return ObjectRequest(
            object=values.required("object", "the name of what to look for"),
            max_objects=max_objects,
            spatial_refs=values.own.get("spatial_refs", ()),
            sampling=self.greedy_sampling(values, self.tokens_per_object * max_objects),
            images=values.images,
            max_crops=values.max_crops,
            adapter=values.adapter,
        )

    def prompt(self, request: ObjectRequest, images: Sequence[ImageSpan], profile: ModelProfile) -> Prompt:
        template = template_of(profile, self.name)
        words = block(profile, template.prefix, request.spatial_refs, " " + request.object, template.suffix)
        return laid_out([*opening(profile, images), *words], self.rules(profile), request.sampling)
