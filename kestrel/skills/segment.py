"""The segment skill: the outline of the named object, as a box and an SVG path relative to that box."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kestrel.errors import RequestError, shown
from kestrel.request import SkillOutput, StreamDelta
from kestrel.settings import INSTANCES, text
from kestrel.skills.base import ModelProfile, Prompt, SkillState
from kestrel.skills.builtin import (
    BuiltinSkill,
    SampledRequest,
    SpatialRef,
    block,
    check_pictures,
    laid_out,
    opening,
    spatial_refs,
    template_of,
)
from kestrel.skills.decode_rules import segment_rules
from kestrel.skills.detect import box_around
from kestrel.skills.fields import TEXT_SETTINGS, FieldTable
from kestrel.skills.states import RecordingState, compact_json, object_score
from kestrel.tokens import CoordToken, ImageSpan, SizeToken, Token

DEFAULT_LAST_CONTROL_ID = 20


def _instances(name: str, value: Any) -> str:
    if value not in INSTANCES:
        raise RequestError(name, f'must be "one" or "all" (got {shown(value)})')
    return value


_FIELDS = FieldTable(
    "segment", {"object": text, "spatial_refs": spatial_refs, "instances": _instances}, refused=TEXT_SETTINGS
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRequest(SampledRequest):
    object: str
    spatial_refs: tuple[SpatialRef, ...] = ()


class SegmentSkill(BuiltinSkill[SegmentRequest]):
    """Result: {"path", "bbox", "label", "score", "segments": [details]}. Greedy unless a temperature is given.

    `instances` is "one" unless given; for "all" the engine looks for them first, and asks here about each.
    """

    name = "segment"
    yields_outline = True
    finds_places = True

    def parse(self, fields: Mapping[str, Any], profile: ModelProfile) -> SegmentRequest:
        template_of(profile, self.name)
        values = _FIELDS.read(fields)
        check_pictures(profile, values.images, needed_by=self.name)
        if values.own.get("instances") == "all" and values.own.get("spatial_refs"):
            raise RequestError("spatial_refs", 'say which one to outline, and instances is "all"; give one of them')
        return SegmentRequest(
            object=values.required("object", "the name of what to outline"),
            spatial_refs=values.own.get("spatial_refs", ()),
            sampling=self.greedy_sampling(values, profile.defaults.max_new_tokens),
            images=values.images,
            max_crops=values.max_crops,
            adapter=values.adapter,
        )

    def prompt(self, request: SegmentRequest, images: Sequence[ImageSpan], profile: ModelProfile) -> Prompt:
        template = template_of(profile, self.name)
        words = block(profile, template.prefix, request.spatial_refs, request.object, template.suffix)
        return laid_out([*opening(profile, images), *words], segment_rules(profile), request.sampling)

    def start(self, request: SegmentRequest, profile: ModelProfile) -> SkillState:
        return SegmentState(profile, request)


class SegmentState(RecordingState):
    """Streams one "bbox" delta, then a "path_delta" per finished path command; joined they are the path."""

    def __init__(self, profile: ModelProfile, request: SegmentRequest) -> None:
        super().__init__(profile, request.sampling)
        self._object = request.object
        self._last_control_id = DEFAULT_LAST_CONTROL_ID if profile.last_control_id is None else profile.last_control_id
        self._coordinates: list[CoordToken] = []
        self._sizes: list[SizeToken] = []
        self._text_ids: list[int] = []
        self._items: list[str] = []
        self._path = _PathStream()
        self._bbox_sent = False

    def take(self, token: Token) -> StreamDelta | None:
        if isinstance(token, CoordToken):
            self._coordinates.append(token)
        elif isinstance(token, SizeToken):
            self._sizes.append(token)
        elif token.id > self._last_control_id:
            self._take_text(token.id)
        if self._bbox_sent:
            return _path_delta(self._path.pop())
        bbox = self._box()
        self._bbox_sent = bbox is not None
        return None if bbox is None else StreamDelta(kind="bbox", data={"bbox": bbox})

    def rest(self) -> StreamDelta | None:
        self._path.end()
        return _path_delta(self._path.pop())

    def output(self) -> SkillOutput:
        try:
            path, parse_error = path_text(parse_path(self._items)), None
        except PathSyntaxError as error:
            path, parse_error = "", str(error)
        bbox = self._box()
        named = {"label": self._object, "score": self._score()}
        segment: dict[str, Any] = {
            "object": self._object,
            "text": self.profile.tokenizer.decode(self._text_ids),
            "svg_path": path,
            "path_tokens": self._items,
            "token_ids": self.token_ids,
            "points": points_of([token.value for token in self._coordinates]),
            "coarse_path": path,
            "bbox": bbox,
            "coarse_bbox": bbox,
            "sizes": [{"width": token.width, "height": token.height} for token in self._sizes],
            **named,
        }
        if parse_error is not None:
            segment["parse_error"] = parse_error
        return SkillOutput(
            {"path": path, "bbox": bbox, **named, "segments": [segment]}, compact_json({"path": path, "bbox": bbox})
        )

    def _box(self) -> dict[str, float] | None:
        coordinates, sizes = [token.value for token in self._coordinates[:2]], self._sizes[:1]
        return outline_box(coordinates, [(size.width, size.height) for size in sizes])

    def _score(self) -> float | None:
        """Of its box; None without one."""
        if len(self._coordinates) < 2 or not self._sizes:
            return None
        return object_score(*self._coordinates[:2], self._sizes[0])

    def _take_text(self, text_id: int) -> None:
        self._text_ids.append(text_id)
        item = self.profile.tokenizer.decode([text_id]).strip()
        if item:
            self._items.append(item)
            self._path.push(item)


class _PathStream:
    """Finished commands as text, up to the first item that is no path."""

    def __init__(self) -> None:
        self._reader: PathReader | None = PathReader()
        self._waiting = ""
        self._started = False

    def push(self, item: str) -> None:
        self._read(item)

    def end(self) -> None:
        self._read(None)
        self._reader = None

    def pop(self) -> str:
        waiting, self._waiting = self._waiting, ""
        return waiting

    def _read(self, item: str | None) -> None:
        if self._reader is None:
            return
        try:
            self._add(self._reader.finish() if item is None else self._reader.push(item))
        except PathSyntaxError:
            self._reader = None

    def _add(self, command: PathCommand | None) -> None:
        if command is not None:
            self._waiting += f" {command}" if self._started else str(command)
            self._started = True


def _path_delta(chunk: str) -> StreamDelta | None:
    return StreamDelta(chunk, "path_delta", {"chunk": chunk}) if chunk else None


def outline_box(coordinates: Sequence[float], sizes: Sequence[tuple[float, float]]) -> dict[str, float] | None:
    """The box of the first centre and size, kept inside the picture; None while either is missing."""
    if len(coordinates) < 2 or not sizes:
        return None
    box = box_around(*(_clamped(v) for v in (*coordinates[:2], *sizes[0])))
    return {side: _clamped(value) for side, value in box.items()}


def points_of(coordinates: Sequence[float]) -> list[dict[str, float]]:
    """Consecutive coordinates as points; a lone last one is dropped."""
    return [{"x": coordinates[i], "y": coordinates[i + 1]} for i in range(0, len(coordinates) - 1, 2)]


def _clamped(value: float) -> float:
    return min(max(value, 0.0), 1.0)


# ---------------------------------------------------------------------- paths

UNITS = 960
"""Paths are written as command letters and integers in a box of so many units, one per token."""
_COMMANDS = frozenset("MmLlHhVvCcSsQqTtAaZz")
_INTEGER = re.compile(r"-?[0-9]{1,9}")


class PathSyntaxError(ValueError):
    """The items do not spell a path."""


@dataclass(frozen=True, slots=True)
class PathCommand:
    letter: str
    pairs: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        """As SVG, scaled so that the box is 1 wide and high."""
        return " ".join([self.letter, *(scaled(value) for pair in self.pairs for value in pair)])


def scaled(value: int) -> str:
    """`value` units as a share of the box, at most three decimals."""
    return f"{value / UNITS:.3f}".rstrip("0").rstrip(".")


class PathReader:
    """Reads items one at a time. A command is complete when the next one begins, or at the end."""

    def __init__(self) -> None:
        self._letter: str | None = None
        self._numbers: list[int] = []
        self._negative = False

    def push(self, item: str) -> PathCommand | None:
        """Take one item; return the command it completes, if any."""
        if item in _COMMANDS:
            completed = self.finish()
            self._letter, self._numbers = item, []
            return completed
        if self._letter is None:
            raise PathSyntaxError(f"the path begins with {item!r} instead of a command")
        if item == "-" and not self._negative:
            self._negative = True
        elif _INTEGER.fullmatch(item):
            self._numbers.append(-int(item) if self._negative else int(item))
            self._negative = False
        else:
            raise PathSyntaxError(f"{item!r} is neither a command nor a number")
        return None

    def finish(self) -> PathCommand | None:
        """The last command. Numbers come in pairs; a lone one is dropped."""
        if self._negative:
            raise PathSyntaxError("a minus sign is not followed by a number")
        if self._letter is None:
            return None
        numbers = self._numbers
        pairs = tuple((numbers[i], numbers[i + 1]) for i in range(0, len(numbers) - 1, 2))
        return PathCommand(self._letter, pairs)


def parse_path(items: Iterable[str]) -> list[PathCommand]:
    reader = PathReader()
    completed = [reader.push(item) for item in items]
    commands = [command for command in (*completed, reader.finish()) if command is not None]
    if not commands:
        raise PathSyntaxError("there is no path at all")
    return commands


def path_text(commands: Iterable[PathCommand]) -> str:
    return " ".join(str(command) for command in commands)
