"""What is asked about every picture, and what the answers mean: from an item to a skill's fields, from its output to
a row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kestrel.errors import ConfigError, RequestError, did_you_mean, shown
from kestrel.labelling.records import Box, Found, Item
from kestrel.settings import CAPTION_LENGTHS, MAX_NAMES
from kestrel.skills.fields import FieldTable

OBJECT_TASKS = ("detect", "point", "segment")
TASKS = (*OBJECT_TASKS, "query", "caption")
COUNTED_IN_OBJECTS = ("detect", "point")
PLACE_DIGITS = 6
TABLES = (".jsonl", ".parquet")
SCORE_DIGITS = 3
"""In float32 a probability can differ by a millionth with the batch that a request shares; finer digits would make rows
depend on what was labelled beside them."""


@dataclass(frozen=True, kw_only=True)
class LabelTask:
    """The same for all pictures, but for items that bring objects or a question of their own."""

    task: str = "detect"
    """detect, point, segment (every instance), query or caption."""
    objects: tuple[str, ...] = ()
    """What to look for, of the first three."""
    question: str | None = None
    """Of query."""
    length: str | None = None
    """Of caption: short, normal or long."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """As every skill takes them. Answers are the most likely ones unless a temperature is given."""
    adapter: str | None = None
    max_crops: int | None = None
    """Most crops that a picture is cut into: fewer are faster and see less detail."""
    min_score: float | None = None
    """Rows are without objects of a lower score; the journal keeps them."""

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            close = did_you_mean(self.task, TASKS)
            raise ConfigError("task", f"must be one of {', '.join(TASKS)} (got {shown(self.task)}){close}")
        own = {"objects": OBJECT_TASKS, "question": ("query",), "length": ("caption",), "min_score": OBJECT_TASKS}
        for name, tasks in own.items():
            if getattr(self, name) not in (None, ()) and self.task not in tasks:
                raise ConfigError(name, f"is not for {self.task}; leave it out, or choose {' or '.join(tasks)}")
        if self.length is not None and self.length not in CAPTION_LENGTHS:
            raise ConfigError("length", f"must be one of {', '.join(CAPTION_LENGTHS)} (got {shown(self.length)})")
        if not all(isinstance(name, str) and name.strip() for name in self.objects):
            raise ConfigError("objects", f"must be names (got {shown(self.objects)})")
        if len(set(self.objects)) < len(self.objects) or len(self.objects) > MAX_NAMES:
            raise ConfigError("objects", f"must be at most {MAX_NAMES} names, each once (got {shown(self.objects)})")
        if self.min_score is not None and not 0 <= self.min_score <= 1:
            raise ConfigError("min_score", f"must be from 0 to 1 (got {shown(self.min_score)})")
        if self.max_crops is not None and self.max_crops < 1:
            raise ConfigError("max_crops", f"must be at least 1 (got {self.max_crops})")
        bound = "max_objects" if self.task in COUNTED_IN_OBJECTS else "max_tokens"
        table = FieldTable(self.task, {}, bound=bound).read({"settings": dict(self.settings)})
        table.sampling(temperature=0.0, top_p=1.0, max_new_tokens=1)
        if "logprobs" in self.settings:
            raise RequestError("logprobs", "has no place in a row; leave it out")

    def identity(self) -> dict[str, Any]:
        """What must be the same for a job to be gone on with. `min_score` may change: the journal has all objects."""
        names = ("task", "objects", "question", "length", "adapter", "max_crops")
        return {**{name: getattr(self, name) for name in names}, "settings": dict(self.settings)}

    def objects_of(self, item: Item) -> tuple[str, ...]:
        return self.objects if item.objects is None else item.objects

    def question_of(self, item: Item) -> str | None:
        """None where no question is asked."""
        if self.task != "query":
            return None
        return self.question if item.question is None else item.question

    def require_complete(self, sources: Iterable[str]) -> None:
        """Rows of a table may bring what to ask; of other sources all pictures are asked the same."""
        if not any(str(name).lower().endswith(TABLES) for name in sources):
            self.require_askable(Item(key="", file="", read=bytes))

    def require_askable(self, item: Item) -> None:
        """An item brings what the task does not say, or nothing can be asked about it."""
        if self.task in OBJECT_TASKS and not self.objects_of(item):
            raise ConfigError("objects", f"is needed by {self.task}; name what to look for, as in gear,bolt")
        if self.task == "query" and not self.question_of(item):
            raise ConfigError(
                "question", "is needed by query; give one for all pictures, or one in each row of a .jsonl"
            )

    def fields(self, item: Item) -> dict[str, Any]:
        """Of the skill, without the picture."""
        fields: dict[str, Any] = {"settings": {"temperature": 0.0, "seed": 0, **self.settings}}
        if self.adapter is not None:
            fields["settings"]["adapter"] = self.adapter
        if self.max_crops is not None:
            fields["max_crops"] = self.max_crops
        if self.task in OBJECT_TASKS:
            names = self.objects_of(item)
            fields["object"] = names[0] if len(names) == 1 else list(names)
        if self.task == "segment":
            fields["instances"] = "all"
        if self.task == "query":
            fields |= {"question": self.question_of(item), "reasoning": False}
        if self.task == "caption":
            fields["length"] = self.length or "normal"
        return fields

    def answer_in(self, output: Mapping[str, Any]) -> str | None:
        return output.get({"query": "answer", "caption": "caption"}.get(self.task, ""))

    def found_in(self, output: Mapping[str, Any], names: Sequence[str]) -> tuple[Found, ...]:
        """The objects of an answer, boxes kept within the picture, in the order of the answer."""
        if self.task == "detect":
            found = (self._found(one, names, box=_box(one)) for one in output["objects"])
        elif self.task == "point":
            found = (self._found(one, names, point=_rounded((one["x"], one["y"]))) for one in output["points"])
        elif self.task == "segment":
            outlines = (one for one in output["segments"] if one.get("bbox") is not None)
            found = (self._found(one, names, box=_box(one["bbox"]), path=one["path"] or None) for one in outlines)
        else:
            found = ()
        return tuple(one for one in found if one.point is not None or _has_area(one.box))

    def _found(self, one: Mapping[str, Any], names: Sequence[str], **place: Any) -> Found:
        score = one.get("score")
        return Found(
            label=one.get("label") or names[0],
            score=None if score is None else round(score, SCORE_DIGITS),
            **place,
        )

    def counts(self, one: Found) -> bool:
        return self.min_score is None or one.score is None or one.score >= self.min_score


def _box(one: Mapping[str, float]) -> Box:
    left, top, right, bottom = _rounded(one[side] for side in ("x_min", "y_min", "x_max", "y_max"))
    return left, top, right, bottom


def _rounded(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(round(min(max(value, 0.0), 1.0), PLACE_DIGITS) for value in values)


def _has_area(box: Box | None) -> bool:
    return box is not None and box[0] < box[2] and box[1] < box[3]
