"""What point and detect share: an object named in words, a bound on how many are found, greedy decoding.

The bound is `max_objects`; each object takes a fixed number of tokens. A temperature above 0 is accepted: it applies to
the choice between one more object and the end, while coordinates and sizes are always the most likely ones.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kestrel.grammar import Grammar
from kestrel.skills.base import ModelProfile, Prompt
from kestrel.skills.builtin import BuiltinSkill, SampledRequest
from kestrel.skills.fields import FieldTable
from kestrel.skills.layout import block, check_pictures, laid_out, opening, template_of
from kestrel.skills.spatial import SpatialRef
from kestrel.tokens import ImageSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRequest(SampledRequest):
    object: str
    max_objects: int
    spatial_refs: tuple[SpatialRef, ...] = ()


class ObjectSkill(BuiltinSkill[ObjectRequest]):
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
