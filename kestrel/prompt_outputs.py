"""What a request may want to know of its own prompt, and what it gets. No tensors.

Position p of the prompt predicts the item after it. So a stretch of positions tells the log-probabilities of the items
that begin one position later, and the first item of a prompt has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from kestrel.errors import RequestError, shown

MAX_LOGPROBS = 64


@dataclass(frozen=True, slots=True)
class PromptOutputs:
    """The wish. Every position of the prompt is computed for it: nothing is read from the prefix cache."""

    logprobs: int | None = None
    """None: no log-probabilities; k ≥ 0: that of every prompt token and of the k most likely ones in its place."""
    pool_from: int | None = None
    """None: no pooling; n ≥ 0: the hidden states after the final norm are summed from position n to the end."""

    def __post_init__(self) -> None:
        if self.logprobs is None and self.pool_from is None:
            raise RequestError("prompt_outputs", "asks for nothing; set logprobs or pool_from, or leave it out")
        for name, value, most in (
            ("prompt_logprobs", self.logprobs, MAX_LOGPROBS),
            ("pool_from", self.pool_from, 2**31 - 1),
        ):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most):
                raise RequestError(name, f"must be an integer from 0 to {most} (got {shown(value)})")


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """Natural-log probabilities of the model's own distribution where a prompt token stands.

    All come from one tensor, so `logprob == top[0][1]` tells exactly whether the token was the most likely one.
    """

    logprob: float
    rank: int
    """1 + how many ids are strictly likelier."""
    top: tuple[tuple[int, float], ...] = ()  # (id, log-probability), most likely first


@dataclass(slots=True, eq=False)
class PromptReport:
    """Adds up what consecutive stretches of one prompt say. Equal reports say the same, however it was cut."""

    stretches: list[Sequence[ScoredToken]] = field(default_factory=list)
    """As they came: a runtime may make a stretch's entries when they are first looked at."""
    hidden_sum: list[float] = field(default_factory=list)
    num_pooled: int = 0

    def add(self, scores: Sequence[ScoredToken], hidden_sum: Sequence[float], num_pooled: int) -> None:
        self.stretches.append(scores)
        if num_pooled:
            before = self.hidden_sum or [0.0] * len(hidden_sum)
            self.hidden_sum = [a + b for a, b in zip(before, hidden_sum, strict=True)]
            self.num_pooled += num_pooled

    @property
    def num_scores(self) -> int:
        return sum(len(stretch) for stretch in self.stretches)

    @property
    def scores(self) -> list[ScoredToken]:
        """One per token but the prompt's first item, in order. Coordinates and sizes are scored by their id; pictures
        are not. Looking at many takes a while, so not on the worker's thread."""
        return list(chain.from_iterable(self.stretches))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PromptReport):
            return NotImplemented
        ours, theirs = ((r.scores, r.hidden_sum, r.num_pooled) for r in (self, other))
        return ours == theirs

    @property
    def hidden_mean(self) -> list[float]:
        """Of the pooled positions, of which there must be some."""
        return [value / self.num_pooled for value in self.hidden_sum]
