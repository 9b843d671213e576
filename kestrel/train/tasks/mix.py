"""How much of which task: every family with its sampler and its weight, and the courses that runs are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate
from random import Random

from kestrel.errors import ConfigError
from kestrel.train.scenes.sampling import EASY, NORMAL, PRINTED, SceneDifficulty
from kestrel.train.scenes.truth import Scene
from kestrel.train.tasks import captions, locating, questions, references, refusals, thinking
from kestrel.train.tasks.example import TaskExample
from kestrel.train.tasks.view import SceneView, TaskWorld

Sampler = Callable[[SceneView, Random], TaskExample | None]
"""An example of one family from a scene, or None when the scene (or the draw) offers none."""

SAMPLERS: Mapping[str, Sampler] = {
    "what": questions.what,
    "contents": questions.contents,
    "colour": questions.colour,
    "background": questions.background,
    "count": questions.count,
    "count_all": questions.count_all,
    "presence": questions.presence,
    "where": questions.where,
    "beside": questions.beside,
    "bigger": questions.bigger,
    "read": questions.read,
    "think_count": thinking.think_count,
    "think_presence": thinking.think_presence,
    "think_other": thinking.think_other,
    "caption_short": captions.caption_short,
    "caption_normal": captions.caption_normal,
    "caption_long": captions.caption_long,
    "point": locating.point,
    "detect": locating.detect,
    "segment": locating.segment,
    "here": references.here,
    "count_in_box": references.count_in_box,
    "point_in_box": references.point_in_box,
    "segment_here": references.segment_here,
    "refusal": refusals.refusal,
    "refusal_without_picture": refusals.refusal_without_picture,
}
_DRAWS_PER_TASK = 6


@dataclass(frozen=True)
class TaskMix:
    """Weight of each family; 0 leaves it out. The defaults favour seeing (points, boxes, counts) over words."""

    what: float = 5.0
    contents: float = 1.5
    colour: float = 4.0
    background: float = 1.0
    count: float = 12.0
    count_all: float = 1.5
    presence: float = 8.0
    where: float = 3.0
    beside: float = 8.0
    bigger: float = 4.0
    read: float = 10.0
    think_count: float = 4.0
    think_presence: float = 2.0
    think_other: float = 2.5
    caption_short: float = 3.5
    caption_normal: float = 4.0
    caption_long: float = 3.0
    point: float = 9.0
    detect: float = 9.0
    segment: float = 3.0
    here: float = 5.0
    count_in_box: float = 2.0
    point_in_box: float = 2.5
    segment_here: float = 1.0
    refusal: float = 0.7
    refusal_without_picture: float = 0.7

    def __post_init__(self) -> None:
        for name, weight in self._weights.items():
            if not weight >= 0.0:
                raise ConfigError(f"mix.{name}", f"must be 0 or more (got {weight!r})")
        if not any(self._weights.values()):
            raise ConfigError("mix", "leaves every family out; give at least one a weight above 0")

    def draw(self, rng: Random) -> Sampler:
        samplers, cumulative = self._table
        return rng.choices(samplers, cum_weights=cumulative)[0]

    @property
    def _weights(self) -> dict[str, float]:
        values = vars(self)
        return {field.name: values[field.name] for field in fields(self)}

    @cached_property
    def _table(self) -> tuple[list[Sampler], list[float]]:
        weights = self._weights
        return [SAMPLERS[name] for name in weights], list(accumulate(weights.values()))


def sample_tasks(scene: Scene, rng: Random, mix: TaskMix, count: int, world: TaskWorld) -> list[TaskExample]:
    """At most `count` different tasks about one scene; fewer only when the scene offers too few."""
    view = SceneView(scene, world)
    examples: list[TaskExample] = []
    for _ in range(_DRAWS_PER_TASK * count):
        if len(examples) == count:
            break
        example = mix.draw(rng)(view, rng)
        if example is not None and not any(_asks_the_same(example, other) for other in examples):
            examples.append(example)
    return examples


def _asks_the_same(a: TaskExample, b: TaskExample) -> bool:
    return a.skill == b.skill and a.fields == b.fields and a.sees_image == b.sees_image


# ---------------------------------------------------------------------- courses
# What a training run shows and asks: a difficulty of scenes, a mix of tasks, and its share of the batches.


@dataclass(frozen=True)
class Course:
    difficulty: SceneDifficulty
    mix: TaskMix = field(default_factory=TaskMix)
    share: float = 1.0

    def __post_init__(self) -> None:
        if not self.share > 0.0:
            raise ConfigError("share", f"of a course must be above 0 (got {self.share!r})")


BEGINNING = Course(EASY)
EVERYTHING = Course(NORMAL)
READING = Course(
    PRINTED,
    TaskMix(
        what=2, contents=0, colour=2, background=0, count=3, count_all=0.5, presence=3, where=1, beside=2, bigger=1,
        read=30, think_count=1, think_presence=0.5, think_other=2, caption_short=0.5, caption_normal=5, caption_long=5,
        point=3, detect=3, segment=0.3, here=25, count_in_box=0.3, point_in_box=0.3, segment_here=0.2, refusal=0.1,
        refusal_without_picture=0.1,
    ),
)  # fmt: skip

COURSES = {"beginning": BEGINNING, "everything": EVERYTHING, "reading": READING}


def named_courses(shares: Iterable[tuple[str, float]]) -> tuple[Course, ...]:
    """From names and shares, as in (("everything", 2.0), ("reading", 1.0))."""
    return tuple(replace(COURSES[name], share=share) for name, share in shares)
