"""The made-up model: complete, repeatable, and readable where it is asked to be."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from kestrel import families
from kestrel.config import RuntimeConfig
from kestrel.models.tokenizer import TextTokenizer
from kestrel.moondream.random_models import NUM_CONTROL_IDS, outline_ids, word_ids, write_tiny_random_folder
from kestrel.moondream.spec import LoadedMoondream


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_seed_decides_the_weights_and_nothing_else(tiny_folder: Path, tmp_path: Path) -> None:
    write_tiny_random_folder(tmp_path / "same")
    write_tiny_random_folder(tmp_path / "other", seed=1)
    same, other, first = contents(tmp_path / "same"), contents(tmp_path / "other"), contents(tiny_folder)
    assert same == first
    assert [name for name in first if other[name] != first[name]] == ["model.safetensors"]


def test_it_has_every_part_of_a_moondream_3(tiny_folder: Path) -> None:
    loaded = families.load(families.resolve(RuntimeConfig(model_path=tiny_folder)), "cpu", torch.float32)
    assert isinstance(loaded, LoadedMoondream)
    assert loaded.config.text.tau_attn
    assert loaded.config.text.moe is not None
    assert {"query", "caption.short", "caption.normal", "caption.long", "point", "detect", "segment"} == set(
        loaded.config.tokenizer.templates
    )


def test_its_tokenizer_knows_words_whole_and_any_text_by_bytes(tiny_folder: Path) -> None:
    tokenizer = TextTokenizer.from_file(tiny_folder / "tokenizer.json")
    assert tokenizer.special_ids == frozenset(range(NUM_CONTROL_IDS))
    for text in (" house", " the cat sits", "naïve – 漢字 🙂", "<|endoftext|>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(" the cat sits")) == 3
    assert set(tokenizer.encode(" the cat sits")) <= set(word_ids())
    vocab_size = json.loads((tiny_folder / "config.json").read_text())["text"]["vocab_size"]
    assert tokenizer.vocab_size <= vocab_size


def test_outline_ids_spell_paths(tiny_folder: Path) -> None:
    tokenizer = TextTokenizer.from_file(tiny_folder / "tokenizer.json")
    coord, size, *spelt = outline_ids()
    assert {coord, size} <= tokenizer.special_ids
    assert {tokenizer.decode_one(token_id).strip() for token_id in spelt} >= {"M", "L", "Z", "0", "480", "960"}
