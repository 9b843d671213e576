"""The point skill: where the named objects are, one point each."""

from __future__ import annotations

from typing import Any

from kestrel.grammar import Grammar
from kestrel.request import SkillOutput, StreamDelta
from kestrel.settings import SamplingParams, text
from kestrel.skills.base import ModelProfile, SkillState
from kestrel.skills.builtin import ObjectRequest, ObjectSkill, spatial_refs
from kestrel.skills.decode_rules import point_rules
from kestrel.skills.fields import TEXT_SETTINGS, FieldTable
from kestrel.skills.states import RecordingState, compact_json, object_score
from kestrel.tokens import CoordToken, Token


class PointSkill(ObjectSkill):
    """Result: {"points": [{"x", "y", "label", "score"}]}. Bounded by `max_objects`, also called `max_points`."""

    name = "point"
    tokens_per_object = 2
    field_table = FieldTable(
        "point",
        {"object": text, "spatial_refs": spatial_refs},
        bound="max_objects",
        other_names={"max_points": "max_objects"},
        refused=TEXT_SETTINGS,
    )

    def rules(self, profile: ModelProfile) -> Grammar:
        return point_rules(profile)

    def start(self, request: ObjectRequest, profile: ModelProfile) -> SkillState:
        return PointState(profile, request.sampling, request.object)


class PointState(RecordingState):
    """Streams a "point" delta per point; a lone x at the end is dropped."""

    def __init__(self, profile: ModelProfile, sampling: SamplingParams, label: str) -> None:
        super().__init__(profile, sampling)
        self._label = label
        self._x: CoordToken | None = None
        self._points: list[dict[str, Any]] = []

    def take(self, token: Token) -> StreamDelta | None:
        if not isinstance(token, CoordToken):
            return None
        if self._x is None:
            self._x = token
            return None
        score = object_score(self._x, token)
        point = {"x": self._x.value, "y": token.value, "label": self._label, "score": score}
        self._x = None
        self._points.append(point)
        return StreamDelta(kind="point", data=dict(point))

    def output(self) -> SkillOutput:
        fields = {"points": self._points}
        return SkillOutput(fields, compact_json(fields))
