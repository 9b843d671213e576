"""A Moondream 3 of a few hundred thousand random weights: every part is there, every answer is noise.

For demonstrations, tests and benchmarks that need a complete model folder and no download. Its tokenizer is a
byte-level BPE that knows some whole words and numbers, so that noise drawn from them can be read.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer

from kestrel.moondream.config import MoondreamConfig, RegionConfig, TextConfig, TokenizerConfig, VisionConfig
from kestrel.moondream.made_tokenizer import BLANK, NUM_CONTROL_IDS, Merges, byte_level_tokenizer, piece_vocabulary
from kestrel.moondream.random_weights import write_random_folder
from kestrel.moondream.sections import MoeConfig, derived_generation
from kestrel.skills.base import Template

__all__ = ["NUM_CONTROL_IDS", "outline_ids", "tiny_random_parts", "word_ids", "write_tiny_random_folder"]

COORD_ID, SIZE_ID = 5, 6

_TEMPLATE_WORDS = "caption short normal long query detect objects point segment"
_WORDS = """
a the this that one two three some every no and or but with without under over near behind before after between
small large old new bright dark quiet loud red green blue yellow white black round square soft warm cold sweet slow
cat dog bird horse fish bee house tree river hill road field garden window door roof cloud sun moon star sky sea stone
leaf flower grass apple bread cup table chair lamp clock book letter song picture boat train wheel bridge tower child
sits stands runs sleeps sings waits looks turns falls grows opens closes carries follows finds keeps paints drinks
is was has seems very often never always almost perhaps again here there now then today tomorrow because while
"""
_OUTLINE_NUMBERS = range(0, 961, 60)
_OUTLINE_LETTERS = "MLZ"


def write_tiny_random_folder(path: Path, seed: int = 0) -> None:
    """A complete model folder; the same seed gives the same bytes."""
    config, tokenizer = tiny_random_parts()
    write_random_folder(path, config, seed, tokenizer.to_str(pretty=True), dtype=torch.float32)


def tiny_random_parts() -> tuple[MoondreamConfig, Tokenizer]:
    """Dimensions and tokenizer; the weights are left to the caller."""
    vocabulary, merges = _vocabulary()
    return _config(vocabulary), byte_level_tokenizer(vocabulary, merges)


def word_ids() -> tuple[int, ...]:
    """Ids of whole words. Sampling only from these gives noise that can be read."""
    return _ids_of(_WORDS.split())


def outline_ids() -> tuple[int, ...]:
    """Ids that outlines are spelt with: coordinates, sizes, path letters and numbers."""
    vocabulary, _ = _vocabulary()
    letters = (vocabulary[letter] for letter in _OUTLINE_LETTERS)
    return (COORD_ID, SIZE_ID, *letters, *_ids_of(str(number) for number in _OUTLINE_NUMBERS))


def _ids_of(words: Iterable[str]) -> tuple[int, ...]:
    vocabulary, _ = _vocabulary()
    return tuple(dict.fromkeys(vocabulary[BLANK + word] for word in words))


def _vocabulary() -> tuple[dict[str, int], Merges]:
    words = [*_TEMPLATE_WORDS.split(), *_WORDS.split(), *map(str, _OUTLINE_NUMBERS)]
    return piece_vocabulary(BLANK + word for word in words)


def _config(vocabulary: dict[str, int]) -> MoondreamConfig:
    vision = VisionConfig(
        enc_dim=64,
        enc_patch_size=14,
        enc_n_layers=2,
        enc_ff_dim=128,
        enc_n_heads=2,
        proj_out_dim=128,
        crop_size=378,
        in_channels=3,
        max_crops=12,
        overlap_margin=4,
        proj_inner_dim=128,
    )
    text = TextConfig(
        dim=128,
        ff_dim=256,
        n_layers=3,
        vocab_size=-(-len(vocabulary) // 64) * 64,
        max_context=2048,
        n_heads=2,
        n_kv_heads=2,
        prefix_attn=1 + vision.num_patches,
        rope_theta=1_500_000.0,
        tau_attn=True,
        moe=MoeConfig(num_experts=8, start_layer=1, experts_per_token=2, expert_inner_dim=64),
    )
    region = RegionConfig(dim=128, coord_feat_dim=64, coord_out_dim=1024, size_feat_dim=64, size_out_dim=2048)
    tokenizer = TokenizerConfig(0, 0, 3, 4, COORD_ID, SIZE_ID, 7, 9, _templates(vocabulary))
    return MoondreamConfig(text, vision, region, tokenizer, derived_generation(text, tokenizer))


def _templates(vocabulary: dict[str, int]) -> dict[str, Template]:
    word = {word: vocabulary[BLANK + word] for word in _TEMPLATE_WORDS.split()}
    templates = {
        f"caption.{length}": Template((1, word["caption"], 2, word[length], 3))
        for length in ("short", "normal", "long")
    }
    templates["query"] = Template((1, word["query"], 2), (3,))
    templates["detect"] = Template((1, word["detect"], word["objects"], 2), (3,))
    templates["point"] = Template((1, word["point"], 2), (3,))
    templates["segment"] = Template((1, word["segment"], 2), (3,))
    return templates
