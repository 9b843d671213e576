"""Byte-level tokenizers made on the spot, for models with random weights."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kestrel.models.tokenizer import BLANK

NUM_CONTROL_IDS = 21

Merges = list[tuple[str, str]]


def piece_vocabulary(pieces: Iterable[str]) -> tuple[dict[str, int], Merges]:
    """Control ids, all bytes, then each piece as a chain of merges from its first letter to its last.

    A piece is a word as byte-level vocabularies write it: `BLANK` stands for the blank before it.
    """
    names = ["<|endoftext|>", *(f"<|md_reserved_{k}|>" for k in range(NUM_CONTROL_IDS - 1))]
    names += sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: index for index, name in enumerate(names)}
    merges: Merges = []
    for piece in pieces:
        known = piece[0]
        for letter in piece[1:]:
            if known + letter not in vocabulary:
                vocabulary[known + letter] = len(vocabulary)
                merges.append((known, letter))
            known += letter
    return vocabulary, merges


def filled_up(vocabulary: dict[str, int], size: int) -> dict[str, int]:
    """With made-up words that no text is split into, so that every id below `size` has a text."""
    fillers = {f"{BLANK}w{index}": index for index in range(len(vocabulary), size)}
    return vocabulary | fillers


def byte_level_tokenizer(vocabulary: dict[str, int], merges: Merges) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    controls = [name for name, index in vocabulary.items() if index < NUM_CONTROL_IDS]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in controls])
    return tokenizer
