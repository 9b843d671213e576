"""Moondreams with random weights, complete in memory: for speed, which does not depend on the values.

They never end an answer by themselves: control ids are biased down, the end id below all others.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tokenizers import Tokenizer

from kestrel.errors import ConfigError, shown
from kestrel.models.tokenizer import TextTokenizer
from kestrel.moondream.config import MOONDREAM2, MOONDREAM3, MoondreamConfig
from kestrel.moondream.made_tokenizer import NUM_CONTROL_IDS, byte_level_tokenizer, filled_up, piece_vocabulary
from kestrel.moondream.model import MoondreamModel
from kestrel.moondream.random_weights import random_model
from kestrel.moondream.spec import LoadedMoondream
from kestrel.moondream.tiny_random import tiny_random_parts

_FULL_SIZE = {"MD2": MOONDREAM2, "MD3": MOONDREAM3}
_TINY = "tiny"
RANDOM_NAMES = (*_FULL_SIZE, _TINY)
_CONTROL_BIAS = -100.0
_END_BIAS = -200.0


def random_moondream(
    name: str, device: torch.device | str, dtype: torch.dtype, pieces: Iterable[str] = (), seed: int = 0
) -> LoadedMoondream:
    """One of `RANDOM_NAMES`, made straight on `device`. The tokenizer of MD2 and MD3 has an id for each of `pieces`
    (see `piece_vocabulary`); that of the tiny one is its own."""
    config, tokenizer = random_parts(name, pieces)
    model = random_model(config, seed, device, dtype)
    _bias_controls_down_(model)
    return LoadedMoondream(f"random-{name}", model, config, TextTokenizer(tokenizer))


def random_parts(name: str, pieces: Iterable[str] = ()) -> tuple[MoondreamConfig, Tokenizer]:
    """Dimensions and tokenizer; the weights are left to the caller."""
    if name == _TINY:
        return tiny_random_parts()
    config = _FULL_SIZE.get(name)
    if config is None:
        raise ConfigError("random", f"{shown(name)} is not a random model; use one of: {', '.join(RANDOM_NAMES)}")
    vocabulary, merges = piece_vocabulary(pieces)
    return config, byte_level_tokenizer(filled_up(vocabulary, config.text.vocab_size), merges)


def _bias_controls_down_(model: MoondreamModel) -> None:
    with torch.no_grad():
        bias_V = model.text.lm_head.bias
        bias_V[:NUM_CONTROL_IDS] = _CONTROL_BIAS
        bias_V[model.config.tokenizer.eos_id] = _END_BIAS
