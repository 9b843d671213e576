"""The tokenizer of kestrel-tiny, and the templates of its prompts.

It is a byte-level BPE trained on task texts. Ids 0 to 20 are controls, then come the 256 bytes, so that any
text can be written. Every number from 0 to 960 and every path letter is one token together with the blank before it,
which makes an outline readable: "M 480 0 L 960 480 Z". Numbers never share a merge with letters, because text is split
between the two before it is merged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from random import Random

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from kestrel.errors import ConfigError
from kestrel.skills.base import RegionIds
from kestrel.skills.model_facts import Template
from kestrel.skills.segment import UNITS
from kestrel.train.model import TokenizerConfig
from kestrel.train.scenes.sampling import NORMAL, sample_batch, scene_at
from kestrel.train.scenes.truth import MAX_OBJECTS, Scene
from kestrel.train.tasks.example import PromptFormat, TaskExample
from kestrel.train.tasks.mix import TaskMix, sample_tasks
from kestrel.train.tasks.view import PathBook, TaskWorld, task_world

NUM_CONTROL_IDS = 21
VOCAB_SIZE = 2048
PATH_LETTERS = "MmLlHhVvCcSsQqTtAaZz"
TEMPLATE_WORDS = ("query", "describe", "short", "normal", "long", "detect", "point", "segment")

_BLANK = "Ġ"  # how byte-level vocabularies write a blank
_DIGITS = re.compile(r"\d+")
_NUM_SCENES = 2000
_TASKS_PER_SCENE = 8
_PICTURE_SIZE = (378, 378)

Merge = tuple[str, str]


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE, whole_words: Iterable[str] = ()) -> str:
    """A tokenizer.json of at most `vocab_size` entries. `whole_words` are one token each, blanks included."""
    wanted = list(dict.fromkeys(_written(word) for word in (*_needed_words(), *whole_words)))
    fixed = [*_control_names(), *_bytes()]
    numbers = list(_number_merges())
    learnt = _learnt_merges(texts, vocab_size)
    while True:
        merges = [*learnt, *numbers]
        merges += _joining_merges(wanted, merges)
        entries = list(dict.fromkeys([*fixed, *(left + right for left, right in merges)]))
        excess = len(entries) - vocab_size
        if excess <= 0:
            return _assembled(entries, merges).to_str(pretty=True)
        if excess > len(learnt):
            raise ConfigError("vocab_size", f"{vocab_size} leaves no room for {excess - len(learnt)} whole words")
        learnt = learnt[:-excess]


def build_tokenizer(seed: int = 0, vocab_size: int = VOCAB_SIZE) -> tuple[str, TokenizerConfig]:
    """A tokenizer.json trained on tasks about random scenes, and the ids and templates for a model's config."""
    world = task_world(PathBook((), ()))
    words = [*world.plurals, *world.plurals.values(), *world.colours, "yes", "no", "nothing"]
    whole_words = [form for word in words if " " not in word for form in (word, f" {word}")]
    tokenizer_json = train_tokenizer(task_texts(_random_scenes(seed), world, seed), vocab_size, whole_words)
    return tokenizer_json, tokenizer_config(tokenizer_json)


def task_texts(scenes: Iterable[Scene], world: TaskWorld, seed: int) -> Iterator[str]:
    """Every text that some tasks about each scene are made of, prompts and targets alike."""
    rng, mix = Random(seed), TaskMix()
    for scene in scenes:
        for example in sample_tasks(scene, rng, mix, _TASKS_PER_SCENE, world):
            yield from _texts_of(example)


def tokenizer_config(tokenizer_json: str) -> TokenizerConfig:
    """The control ids of every Moondream and templates of this tokenizer's words."""
    vocabulary = Tokenizer.from_str(tokenizer_json).get_vocab()
    word = {word: vocabulary[_BLANK + word] for word in TEMPLATE_WORDS}
    templates = {
        f"caption.{length}": Template((1, word["describe"], 2, word[length], 3))
        for length in ("short", "normal", "long")
    }
    for skill in ("query", "detect", "point", "segment"):
        templates[skill] = Template((1, word[skill], 2), (3,))
    return TokenizerConfig(
        bos_id=0,
        eos_id=0,
        answer_id=3,
        thinking_id=4,
        coord_id=5,
        size_id=6,
        start_ground_points_id=7,
        end_ground_id=9,
        templates=templates,
    )


def prompt_format(tokenizer_json: str, config: TokenizerConfig) -> PromptFormat:
    """The same as plain data for worker processes."""
    regions = RegionIds(config.coord_id, config.size_id, config.start_ground_points_id, config.end_ground_id)
    ids = (config.bos_id, config.eos_id, config.answer_id, config.thinking_id)
    return PromptFormat(tokenizer_json, *ids, regions, dict(config.templates))


def _random_scenes(seed: int) -> Iterator[Scene]:
    seeds = np.arange(seed * _NUM_SCENES, (seed + 1) * _NUM_SCENES)
    batch = sample_batch(seeds, *_PICTURE_SIZE, NORMAL)
    return (scene_at(batch, row) for row in range(len(seeds)))


def _texts_of(example: TaskExample) -> Iterator[str]:
    if "question" in example.fields:
        yield example.fields["question"]
    if "object" in example.fields:
        name = example.fields["object"]
        yield name if example.skill == "segment" else f" {name}"
    yield from (piece for piece in example.target if isinstance(piece, str))


def _control_names() -> list[str]:
    return ["<|endoftext|>", *(f"<|md_reserved_{k}|>" for k in range(NUM_CONTROL_IDS - 1))]


def _bytes() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _needed_words() -> Iterator[str]:
    yield from (f" {word}" for word in TEMPLATE_WORDS)
    yield from (f" {letter}" for letter in PATH_LETTERS)
    yield " -"


def _number_merges() -> Iterator[Merge]:
    """Numbers after a blank up to the largest of an outline, and bare ones up to the largest count."""
    for number in range(UNITS + 1):
        digits = str(number)
        yield _BLANK + digits[:-1], digits[-1]
    for count in range(10, MAX_OBJECTS + 1):
        digits = str(count)
        yield digits[0], digits[1]


def _learnt_merges(texts: Iterable[str], vocab_size: int) -> list[Merge]:
    """What byte-pair encoding makes of the texts without their numbers, most useful merge first."""
    tokenizer = _with_bytes(Tokenizer(models.BPE()))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=_bytes(), show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator((_DIGITS.sub("", text) for text in texts), trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return [(left, right) for left, right in merges]


def _joining_merges(words: Iterable[str], merges: Iterable[Merge]) -> list[Merge]:
    """Merges that make each word one token after all of `merges`. A later merge cannot undo an earlier one."""
    ranks = {merge: rank for rank, merge in enumerate(merges)}
    added: list[Merge] = []
    for word in words:
        first, *rest = _pieces(word, ranks)
        for piece in rest:
            added.append((first, piece))
            ranks[first, piece] = len(ranks)
            first += piece
    return added


def _pieces(word: str, ranks: dict[Merge, int]) -> list[str]:
    """A word as byte-pair encoding leaves it: the merge of the lowest rank first, until none applies."""
    pieces = list(word)
    while True:
        pairs = [(ranks[pair], at) for at, pair in enumerate(pairwise(pieces)) if pair in ranks]
        if not pairs:
            return pieces
        at = min(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


def _written(text: str) -> str:
    """ASCII text in the letters of a byte-level vocabulary."""
    return text.replace(" ", _BLANK)


def _assembled(entries: list[str], merges: list[Merge]) -> Tokenizer:
    vocabulary = {entry: index for index, entry in enumerate(entries)}
    tokenizer = _with_bytes(Tokenizer(models.BPE(vocab=vocabulary, merges=merges)))
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in _control_names()])
    return tokenizer


def _with_bytes(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer
