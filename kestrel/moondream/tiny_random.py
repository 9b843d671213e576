"""A Moondream 3 of a few hundred thousand random weights: every part is there, every answer is noise.

For demonstrations, tests and benchmarks that need a complete model folder and no download. Its tokenizer is a
byte-level BPE that knows some whole words and numbers, so that noise drawn from them can be read.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kestrel.moondream.config import MoondreamConfig, RegionConfig, TextConfig, TokenizerConfig, VisionConfig
from kestrel.moondream.random_weights import write_random_folder
from kestrel.moondream.sections import MoeConfig, derived_generation
from kestrel.skills.base import Template

NUM_CONTROL_IDS = 21
COORD_ID, SIZE_ID = 5, 6
_BLANK = "Ġ"  # how byte-level vocabularies write a blank

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
    vocabulary, merges = _vocabulary()
    config = _config(vocabulary)
    write_random_folder(path, config, seed, _tokenizer(vocabulary, merges).to_str(pretty=True), dtype=torch.float32)


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
    return tuple(dict.fromkeys(vocabulary[_BLANK + word] for word in words))


def _vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Control ids, all bytes, then each word as a chain of merges from its first letter to its last."""
    names = ["<|endoftext|>", *(f"<|md_reserved_{k}|>" for k in range(NUM_CONTROL_IDS - 1))]
    names += sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: index for index, name in enumerate(names)}
    merges: list[tuple[str, str]] = []
    for word in [*_TEMPLATE_WORDS.split(), *_WORDS.split(), *map(str, _OUTLINE_NUMBERS)]:
        known = _BLANK
        for letter in word:
            if known + letter not in vocabulary:
                vocabulary[known + letter] = len(vocabulary)
                merges.append((known, letter))
            known += letter
    return vocabulary, merges


def _tokenizer(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    controls = [name for name, index in vocabulary.items() if index < NUM_CONTROL_IDS]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in controls])
    return tokenizer


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
    word = {word: vocabulary[_BLANK + word] for word in _TEMPLATE_WORDS.split()}
    templates = {
        f"caption.{length}": Template((1, word["caption"], 2, word[length], 3))
        for length in ("short", "normal", "long")
    }
    templates["query"] = Template((1, word["query"], 2), (3,))
    templates["detect"] = Template((1, word["detect"], word["objects"], 2), (3,))
    templates["point"] = Template((1, word["point"], 2), (3,))
    templates["segment"] = Template((1, word["segment"], 2), (3,))
    return templates
