"""How to choose tokens: what a request may ask for, and its bounds. No tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kestrel.errors import RequestError, shown

MAX_LOGPROBS = 64
MAX_SEED = 2**63 - 1
MAX_LOGIT_BIAS = 300
MAX_TEMPERATURE = 2.0
"""What clients of the OpenAI API may send; above it a text is hardly more than chance."""
MAX_STOP_TOKEN_IDS = 64
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 1000
MIN_REPETITION_PENALTY = 0.01
"""Scores are divided by it; far smaller ones would leave the range of float32."""
MAX_TOKENS = 2**31 - 1
BOUNDS: Mapping[str, tuple[float, float]] = {
    "max_tokens": (0, MAX_TOKENS),
    "temperature": (0.0, MAX_TEMPERATURE),
    "top_p": (0.0, 1.0),
    "top_k": (0, MAX_TOKENS),
    "min_p": (0.0, 1.0),
    "seed": (0, MAX_SEED),
    "logprobs": (0, MAX_LOGPROBS),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (MIN_REPETITION_PENALTY, 2.0),
    "min_tokens": (0, MAX_TOKENS),
}
"""Lowest and highest value of each setting, by the name that requests have for it."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when they end.

    Order: penalties → bias → suppress → temperature → softmax → top-k → top-p → min-p → draw.
    """

    max_new_tokens: int = 768
    """Token budget of each phase (reasoning and answer count apart). 0 is for requests about the prompt alone."""
    temperature: float = 0.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    """Keep the smallest set of likely tokens whose probability reaches this; the token that crosses it stays."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one."""
    seed: int = 0
    """Same seed, same request: same text, whatever else is in the batch."""
    logprobs: int | None = None
    """None: no log-probabilities; k ≥ 0: that of the chosen token and of the k most likely ones."""
    allowed_ids: tuple[int, ...] = ()
    """If not empty, only these ids may be sampled."""
    suppressed_ids: tuple[int, ...] = ()
    """These ids are never sampled."""
    presence_penalty: float = 0.0
    """Taken once from the score of every text id generated so far, thinking included."""
    frequency_penalty: float = 0.0
    """Taken from the score of a text id as often as it was generated."""
    repetition_penalty: float = 1.0
    """Divides a positive score, multiplies a negative one, of every text id generated or in the prompt."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(id, number added to its score), each id once."""
    min_tokens: int = 0
    """Answer tokens before one that ends the answer may be sampled. A text of `stop` ends it all the same."""
    ignore_eos: bool = False
    """Never sample the end id: the answer ends by its budget or by a stop."""
    stop_token_ids: tuple[int, ...] = ()
    """Further ids that end an answer, wherever the end id would; not part of the text."""
    stop: tuple[str, ...] = ()
    """The answer ends right before the first of these texts. Decided by the skill, on the host."""

    def __post_init__(self) -> None:
        for name, (low, high) in BOUNDS.items():
            value = self.max_new_tokens if name == "max_tokens" else getattr(self, name)
            if name != "logprobs" or value is not None:
                require_within(name, value, low, high)
        if self.top_p == 0.0:
            raise RequestError("top_p", "must be above 0 (got 0); use temperature=0 for the most likely token")
        if self.min_tokens > self.max_new_tokens:
            raise RequestError(
                "min_tokens", f"must not exceed max_tokens ({self.max_new_tokens}) (got {self.min_tokens})"
            )
        self._check_lists()

    def _check_lists(self) -> None:
        lists = (
            ("logit_bias", self.logit_bias, MAX_LOGIT_BIAS),
            ("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS),
            ("stop", self.stop, MAX_STOPS),
        )
        for name, entries, most in lists:
            if len(entries) > most:
                raise RequestError(name, f"has {len(entries)} entries; at most {most} are possible")
        if len({token_id for token_id, _ in self.logit_bias}) < len(self.logit_bias):
            raise RequestError("logit_bias", "names an id twice; give each id once")
        for token_id, bias in self.logit_bias:
            if not -100.0 <= bias <= 100.0:
                raise RequestError("logit_bias", f"of id {token_id} must be from -100 to 100 (got {shown(bias)})")
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_CHARACTERS:
                raise RequestError(
                    "stop", f"must be texts of 1 to {MAX_STOP_CHARACTERS} characters (got {shown(text)})"
                )

    @property
    def has_penalties(self) -> bool:
        """Whether scores depend on what was said before."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


def require_within(name: str, value: object, low: float, high: float) -> None:
    """An integer where the bounds are integers, else any number."""
    if isinstance(low, int):
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise RequestError(name, f"must be an integer from {low} to {high} (got {shown(value)})")
    elif isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise RequestError(name, f"must be a number from {low:g} to {high:g} (got {shown(value)})")
