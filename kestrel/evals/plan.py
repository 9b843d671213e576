"""What one evaluation asks: which families, how many questions each, at which picture size; and where its seeds are."""

from __future__ import annotations

from dataclasses import dataclass

from kestrel.errors import ConfigError
from kestrel.train.scenes.sampling import FIRST_HELD_OUT_SEED, HELD_OUT, MIN_PICTURE_PX
from kestrel.train.tasks.mix import SAMPLERS

HELD_OUT_SEED = FIRST_HELD_OUT_SEED
HELD_OUT_DIFFICULTY = HELD_OUT
FAMILY_NAMES = tuple(SAMPLERS)
DEFAULT_SIZE = (378, 378)
MAX_PICTURE_PX = 4096
MAX_QUESTIONS = 10**6
MAX_CONCURRENCY = 4096
MAX_TOKENS = 2**16


@dataclass(frozen=True, kw_only=True)
class EvalPlan:
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
