"""What the built-in skills share beyond the contract: sampling, answer formats, and objects named in words."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from kestrel.errors import RequestError
from kestrel.grammar import Grammar
from kestrel.request import Constraint
from kestrel.sampling_params import SamplingParams
from kestrel.skills.base import ModelProfile, Prompt, SkillRequest, SkillSpec
from kestrel.skills.fields import DrawSeed, FieldTable, Values, random_seed
from kestrel.skills.layout import SpatialRef, block, check_pictures, laid_out, opening, template_of
from kestrel.tokens import ImageSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRequest(SkillRequest):
    sampling: SamplingParams


SampledT = TypeVar("SampledT", bound=SampledRequest)


class BuiltinSkill(SkillSpec[SampledT]):
    def __init__(self, draw_seed: DrawSeed = random_seed) -> None:
        self._draw_seed = draw_seed

    def text_sampling(self, values: Values, profile: ModelProfile) -> SamplingParams:
        """Free text: the model's own temperature and top-p unless the request says otherwise."""
        defaults = profile.defaults
        return values.sampling(
            temperature=defaults.temperature,
            top_p=defaults.top_p,
            max_new_tokens=defaults.max_new_tokens,
            draw_seed=self._draw_seed,
        )

    def greedy_sampling(self, values: Values, max_new_tokens: int) -> SamplingParams:
        """Structured output: the most likely token unless the request says otherwise."""
        return values.sampling(temperature=0.0, top_p=1.0, max_new_tokens=max_new_tokens, draw_seed=self._draw_seed)


def answer_constraint(request: SampledRequest, grammar: Grammar, profile: ModelProfile) -> Constraint | None:
    """What `response_format` asks for. It holds in the last phase of the grammar, so thinking stays free."""
    if request.response_format is None:
        return None
    if profile.constraints is None:
        raise RequestError("response_format", f"is not supported by {profile.name}; leave it out or use another model")
    if request.sampling.allowed_ids or request.sampling.suppressed_ids:
        remedy = "the two can leave no token at all; give one of them"
        raise RequestError("response_format", f"does not go with allowed_ids or suppressed_ids: {remedy}")
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
            adapter=values.adapter,
        )

    def prompt(self, request: ObjectRequest, images: Sequence[ImageSpan], profile: ModelProfile) -> Prompt:
        template = template_of(profile, self.name)
        words = block(profile, template.prefix, request.spatial_refs, " " + request.object, template.suffix)
        return laid_out([*opening(profile, images), *words], self.rules(profile), request.sampling)
