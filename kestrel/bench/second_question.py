"""What a second question about a picture costs: `python -m kestrel.bench.second_question --weights DIR --image FILE`.

Every round asks two questions, one after the other, about a picture nobody has seen (the file, with one pixel changed).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from PIL import Image

from kestrel.bench.results import append_row, command_parser, environment
from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine

QUESTIONS = ("What is in this picture?", "Is there a cat?")


@dataclass(frozen=True)
class SecondQuestion:
    """Medians over the rounds, in milliseconds until the first token."""

    first_ms: float
    second_ms: float
    cached_tokens: int

    @property
    def ratio(self) -> float:
        return self.first_ms / self.second_ms


async def measure(config: RuntimeConfig, picture: Path, rounds: int) -> SecondQuestion:
    pixels = np.array(Image.open(picture).convert("RGB"))
    first: list[float] = []
    second: list[float] = []
    cached = 0
    async with await InferenceEngine.create(config) as engine:
        for round_index in range(rounds):
            own = pixels.copy()
            own[0, 0] = (round_index % 256, round_index // 256, 0)
            for question, times in zip(QUESTIONS, (first, second), strict=True):
                result = await engine.query(own, question, reasoning=False, max_new_tokens=2, temperature=0)
                times.append(result.metrics.ttft_ms)
                cached = result.metrics.cached_tokens
    return SecondQuestion(median(first), median(second), cached)


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--image", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    config = RuntimeConfig(model_path=args.weights, device=args.device)
    found = asyncio.run(measure(config, args.image, args.rounds))
    print(f"first {found.first_ms:.1f} ms, second {found.second_ms:.1f} ms, ratio {found.ratio:.1f}")
    what = {"model": Path(args.weights).name, "image": args.image.name, "cached_tokens": found.cached_tokens}
    figures = {"first_ttft_ms": found.first_ms, "second_ttft_ms": found.second_ms, "ratio": found.ratio}
    append_row(args.output, {**environment(), **what, **figures})


if __name__ == "__main__":
    main()
