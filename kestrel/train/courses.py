"""What a training run shows and asks: a difficulty of scenes, a mix of tasks, and its share of the batches."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kestrel.errors import ConfigError
from kestrel.train.scenes.sampling import EASY, NORMAL, PRINTED, SceneDifficulty
from kestrel.train.tasks.mix import TaskMix


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


def named_courses(shares: dict[str, float]) -> tuple[Course, ...]:
    """From names and shares, as in {"everything": 2, "reading": 1}."""
    unknown = sorted(shares.keys() - COURSES.keys())
    if unknown:
        raise ConfigError("courses", f"there is no {unknown[0]!r}; known are: {', '.join(COURSES)}")
    return tuple(replace(COURSES[name], share=share) for name, share in shares.items())
