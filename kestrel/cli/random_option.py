"""--random, which the measuring verbs share."""

from __future__ import annotations

from typing import Annotated

import typer

from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError
from kestrel.moondream.random_models import RANDOM_NAMES

RandomOption = Annotated[
    str | None,
    typer.Option(
        "--random",
        metavar="NAME",
        help=f"Random weights made on the device instead of a model: {', '.join(RANDOM_NAMES)}.",
    ),
]


def check_random(random: str | None, config: RuntimeConfig) -> None:
    if random is None:
        return
    if random not in RANDOM_NAMES:
        raise ConfigError("--random", f"{random!r} is not a random model; use one of: {', '.join(RANDOM_NAMES)}")
    if config.model is not None or config.weights is not None:
        raise ConfigError("--random", "takes the place of a model; leave out --model and --model-path")
