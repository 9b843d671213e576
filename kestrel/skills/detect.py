"""The detect skill: where the named objects are, one box each."""

from __future__ import annotations

from typing import Any

from kestrel.grammar import Grammar
from kestrel.request import SkillOutput, StreamDelta
from kestrel.settings import SamplingParams, text
from kestrel.skills.base import ModelProfile, SkillState
from kestrel.skills.builtin import ObjectRequest, ObjectSkill
from kestrel.skills.decode_rules import detect_rules
from kestrel.skills.fields import TEXT_SETTINGS, FieldTable
from kestrel.skills.states import RecordingState, compact_json, object_score
from kestrel.tokens import CoordToken, SizeToken, Token


class DetectSkill(ObjectSkill):
    """Result: {"objects": [{"x_min", "y_min", "x_max", "y_max", "label", "score"}]}. Boxes may leave the picture."""

    name = "detect"
    tokens_per_object = 3
    field_table = FieldTable("detect", {"object": text}, bound="max_objects", refused=TEXT_SETTINGS)

    def rules(self, profile: ModelProfile) -> Grammar:
        return detect_rules(profile)

    def start(self, request: ObjectRequest, profile: ModelProfile) -> SkillState:
        return DetectState(profile, request.sampling, request.object)


class DetectState(RecordingState):
    """Streams an "object" delta per box; a centre without a size at the end is dropped."""

    def __init__(self, profile: ModelProfile, sampling: SamplingParams, label: str) -> None:
        super().__init__(profile, sampling)
        self._label = label
        self._centre: list[CoordToken] = []
        self._objects: list[dict[str, Any]] = []

    def take(self, token: Token) -> StreamDelta | None:
        if isinstance(token, CoordToken):
            self._centre.append(token)
        if not isinstance(token, SizeToken):
            return None
        (x, y), self._centre = self._centre[:2], []
        box = box_around(x.value, y.value, token.width, token.height)
        found = {**box, "label": self._label, "score": object_score(x, y, token)}
        self._objects.append(found)
        return StreamDelta(kind="object", data=dict(found))

    def output(self) -> SkillOutput:
        fields = {"objects": self._objects}
        return SkillOutput(fields, compact_json(fields))


def box_around(x: float, y: float, width: float, height: float) -> dict[str, float]:
    return {"x_min": x - width / 2, "y_min": y - height / 2, "x_max": x + width / 2, "y_max": y + height / 2}
