"""What an evaluation is asked to do: `EvalPlan` about scenes, `LocatePlan` about annotated pictures.

Help reads this file: it imports no libraries.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kestrel.errors import ConfigError
from kestrel.settings import MAX_OBJECTS
from kestrel.train.adapter.options import data_files
from kestrel.train.options import MIN_PICTURE_PX

FAMILY_NAMES = (
    "what", "contents", "colour", "background", "count", "count_all", "presence", "where", "beside", "bigger", "read",
    "think_count", "think_presence", "think_other", "caption_short", "caption_normal", "caption_long", "point",
    "detect", "segment", "here", "count_in_box", "point_in_box", "segment_here", "refusal", "refusal_without_picture",
)  # fmt: skip
"""Those of `kestrel.train.tasks.mix`, which imports much."""
DEFAULT_SIZE = (378, 378)
MAX_PICTURE_PX = 4096
MAX_QUESTIONS = 10**6
MAX_CONCURRENCY = 4096
MAX_TOKENS = 2**16


@dataclass(frozen=True, kw_only=True)
class EvalPlan:
    """Which families, how many questions of each, at which picture size."""

    num_questions: int = 1000
    """Questions of each family."""
    families: tuple[str, ...] = FAMILY_NAMES
    size: tuple[int, int] = DEFAULT_SIZE
    """Height and width of the pictures."""
    concurrency: int = 16
    """Requests that are unanswered at the same time."""
    max_new_tokens: int = 256
    """Bound of every text, thought and outline, far above the right ones: it ends what does not stop by itself."""

    def __post_init__(self) -> None:
        _check_range("n", self.num_questions, 1, MAX_QUESTIONS)
        _check_range("concurrency", self.concurrency, 1, MAX_CONCURRENCY)
        _check_range("max_new_tokens", self.max_new_tokens, 1, MAX_TOKENS)
        for side in self.size:
            _check_range("size", side, MIN_PICTURE_PX, MAX_PICTURE_PX)
        if not self.families:
            raise ConfigError("families", f"names none; known are: {', '.join(FAMILY_NAMES)}")
        for name in self.families:
            if name not in FAMILY_NAMES:
                raise ConfigError("families", f"there is no {name!r}; known are: {', '.join(FAMILY_NAMES)}")


def _check_range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(field, f"must be from {low} to {high} (got {value})")


SKILLS = ("detect", "point")
MOST_PREDICTIONS = 100
"""Of one picture and label that the average precision looks at."""


@dataclass(frozen=True)
class LocatePlan:
    """What is asked, and how."""

    skill: str = "detect"
    negatives: float = 1.0
    """Share of the questions about COCO pictures that ask for what is not there; 1 asks for everything everywhere."""
    seed: int = 0
    concurrency: int = 16
    max_objects: int = MOST_PREDICTIONS

    def __post_init__(self) -> None:
        if self.skill not in SKILLS:
            raise ConfigError("skill", f"{self.skill!r} locates nothing; use {' or '.join(SKILLS)}")
        if not 0.0 <= self.negatives <= 1.0:
            raise ConfigError("negatives", f"must be from 0 to 1 (got {self.negatives:g})")
        if not 1 <= self.max_objects <= MAX_OBJECTS:
            raise ConfigError("max_objects", f"must be from 1 to {MAX_OBJECTS} (got {self.max_objects})")
        if self.concurrency < 1:
            raise ConfigError("concurrency", f"must be 1 or more (got {self.concurrency})")


def annotations_in(data: Path) -> Path:
    """The file itself, or of a training folder the one to judge by, else the one to learn from."""
    if data.is_file():
        if data.suffix not in (".json", ".jsonl"):
            raise ConfigError("data", f"{data} is neither COCO (.json) nor lines of tasks (.jsonl); name such a file")
        return data
    train, val = data_files(data)
    return val or train
