"""What comes in: requests with their pictures and lengths, drawn at random from a seed, and when each is sent."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kestrel.errors import ConfigError, shown
from kestrel.grammar import free_text
from kestrel.request import GenerationRequest
from kestrel.runtime.fake import NullConsumer
from kestrel.settings import SamplingParams
from kestrel.simulation.costs import StepCosts
from kestrel.tokens import ContextItem, ImageSpan, Text

GRAMMAR = free_text(10**9)
"""Ends by length alone: that id never comes."""
CONSUMER = NullConsumer()
MAX_REQUESTS = 1_000_000


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens, each as likely as the others."""

    low: int
    high: int

    @classmethod
    def parse(cls, field: str, text: str) -> Lengths:
        """From "30" or "3-30"."""
        match = re.fullmatch(r"([0-9]{1,7})(?:-([0-9]{1,7}))?", text.strip())
        lengths = None if match is None else cls(int(match[1]), int(match[2] or match[1]))
        if lengths is None or not 1 <= lengths.low <= lengths.high:
            raise ConfigError(
                field, f"{shown(text)} is not a number of tokens from 1 on; write 30, or 3-30 for a range"
            )
        return lengths

    def draw(self, dice: random.Random) -> int:
        return self.low if self.low == self.high else dice.randint(self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """`rate` or `clients` says when requests come; without either all come at once."""

    rate: float | None = None
    """Requests a second, at random times (Poisson)."""
    clients: int | None = None
    """So many clients, each with one request at a time."""
    requests: int
    crops: int = 9
    """Of each picture; 0: no pictures."""
    repeated: float = 0.0
    """Share of the requests about one of the latest pictures."""
    among: int = 100
    """How many are the latest."""
    prompt_tokens: Lengths = Lengths(20, 20)
    """Without the picture."""
    answer_tokens: Lengths = Lengths(30, 30)
    stream: bool = False
    picture_kb: float = 100.0
    link_gbit: float = 10.0
    """Of the way in that all pictures share."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rate is not None and self.clients is not None:
            raise ConfigError("clients", "send when they are answered, not at a rate; give one of rate and clients")
        bounds = {"rate": (1e-3, 1e6), "repeated": (0, 1), "picture_kb": (0, 1e6), "link_gbit": (1e-3, 1e6)}
        bounds |= {"clients": (1, 100_000), "requests": (1, MAX_REQUESTS), "crops": (0, 1000), "among": (1, 100_000)}
        for name, (low, high) in {**bounds, "seed": (0, 2**63)}.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(name, f"must be from {low:g} to {high:g} (got {value:g})")
        if self.repeated and not self.crops:
            raise ConfigError("repeated", "is about pictures, and crops is 0; leave it out, or give crops")

    def check(self, costs: StepCosts) -> None:
        """Whether the model can be asked this."""
        if self.crops and not costs.reads_pictures:
            raise ConfigError("crops", f"must be 0: {costs.measured_as} reads no pictures")
        longest = self.prompt_tokens.high + self.answer_tokens.high + (costs.num_image_positions if self.crops else 0)
        if longest > costs.max_context:
            raise ConfigError(
                "prompt_tokens",
                f"with the picture and answer_tokens up to {longest:g} positions, and the model's context has "
                f"{costs.max_context:g}; lower one of them",
            )

    @property
    def picture_s(self) -> float:
        """On the way in; a picture of 100 kB has 133 in base64, as bodies of JSON carry it."""
        return self.picture_kb * 8e3 * 4 / 3 / (self.link_gbit * 1e9) if self.crops else 0.0

    def send_times(self) -> Iterator[float]:
        """Of the requests that wait for nobody; those of clients begin together."""
        if self.rate is None:
            yield from [0.0] * min(self.requests, self.clients or self.requests)
            return
        dice, now_s = random.Random(self.seed), 0.0
        for _ in range(self.requests):
            now_s += dice.expovariate(self.rate)
            yield now_s

    def make(self, costs: StepCosts) -> Iterator[GenerationRequest]:
        """The same ones for every number of GPUs."""
        dice = random.Random(self.seed + 1)
        num_pictures = 0
        for number in range(self.requests):
            first_id = number * 2**20  # no two prompts begin alike
            items: Sequence[ContextItem] = Text(range(first_id, first_id + self.prompt_tokens.draw(dice)))
            images: dict[str, None] = {}
            if self.crops:
                is_known = num_pictures > 0 and dice.random() < self.repeated
                back = dice.randrange(min(self.among, num_pictures)) + 1 if is_known else 0
                digest = f"{num_pictures - back:016x}"
                num_pictures += not is_known
                images[digest] = None
                items = (ImageSpan(digest, int(costs.num_image_positions), bos_id=0), *items)
            yield GenerationRequest(
                request_id=f"r{number}",
                items=items,
                grammar=GRAMMAR,
                sampling=SamplingParams(max_new_tokens=self.answer_tokens.draw(dice)),
                consumer=CONSUMER,
                images=images,
                is_streaming=self.stream,
                has_reader=False,
            )
