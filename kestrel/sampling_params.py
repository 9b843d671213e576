"""How the runtime chooses the tokens of one request: checked values of `kestrel.settings`. No tensors."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kestrel.errors import RequestError
from kestrel.settings import SETTINGS, tokens_or_none


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when they end. `kestrel.settings` has the meaning and the bounds of each field.

    Order: penalties → bias → suppress → temperature → softmax → top-k → top-p → min-p → draw.
    """

    max_new_tokens: int = 768
    """`max_tokens`, of each phase (reasoning and answer count apart). 0 is for requests about the prompt alone."""
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    logprobs: int | None = None
    """None: no log-probabilities; k ≥ 0: that of the chosen token and of the k most likely ones."""
    allowed_ids: tuple[int, ...] = ()
    """Empty: all."""
    suppressed_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(id, number added to its score), each id once."""
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Decided by the skill, on the host."""

    def __post_init__(self) -> None:
        tokens_or_none("max_tokens", self.max_new_tokens)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in SETTINGS and value is not field.default:
                SETTINGS[field.name].kind(field.name, dict(value) if field.name == "logit_bias" else value)
        if len(dict(self.logit_bias)) < len(self.logit_bias):
            raise RequestError("logit_bias", "names an id twice; give each id once")
        if self.min_tokens > self.max_new_tokens:
            raise RequestError(
                "min_tokens", f"must not exceed max_tokens ({self.max_new_tokens}) (got {self.min_tokens})"
            )

    @property
    def has_penalties(self) -> bool:
        """Whether scores depend on what was said before."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)
