from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as TokenizerJson

from kestrel.errors import ConfigError
from kestrel.models.tokenizer import TextTokenizer
from kestrel.moondream.config import TokenizerConfig
from kestrel.skills.segment import PathCommand, parse_path
from kestrel.train.scenes.catalogue import WORDS
from kestrel.train.tasks.locating import path_pieces
from kestrel.train.tiny import PATH_LETTERS, build_tokenizer, prompt_format, tokenizer_config, train_tokenizer

from .driving import examples_of
from .made_scenes import profile, task_format, world


def _tokenizer() -> TextTokenizer:
    tokenizer = profile().tokenizer
    assert isinstance(tokenizer, TextTokenizer)
    return tokenizer


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back(text: str) -> None:
    tokenizer = _tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text(" 0123456789MLZ-abc<|>_reserved", max_size=30))
def test_digits_letters_and_names_of_controls_come_back_as_text(text: str) -> None:
    ids = _tokenizer().encode(text)
    assert _tokenizer().decode(ids) == text
    assert not set(ids) & set(range(21))


def test_control_ids_have_their_names_and_no_text() -> None:
    names = [_tokenizer().token_name(token_id) for token_id in range(21)]
    assert names == ["<|endoftext|>", *(f"<|md_reserved_{k}|>" for k in range(20))]
    assert _tokenizer().decode(range(21)) == ""


def test_every_item_of_a_path_is_one_token_that_decodes_alone() -> None:
    items = [*PATH_LETTERS, *map(str, range(961)), "-"]
    ids = [_tokenizer().encode(f" {item}") for item in items]
    assert all(len(one) == 1 and one[0] > 20 for one in ids)
    assert [_tokenizer().decode_one(one[0]).strip() for one in ids] == items


def test_a_path_read_token_by_token_is_the_path_that_was_written() -> None:
    path = ("M", 480, 0, "C", 960, 0, 960, 480, 960, 960, "L", -7, 481, "Z")
    ids = [token_id for piece in path_pieces(path) for token_id in _tokenizer().encode(piece)]
    assert len(ids) == len(path) + 1  # the minus sign
    assert parse_path(_tokenizer().decode_one(token_id).strip() for token_id in ids) == [
        PathCommand("M", ((480, 0),)),
        PathCommand("C", ((960, 0), (960, 480), (960, 960))),
        PathCommand("L", ((-7, 481),)),
        PathCommand("Z"),
    ]
    whole = _tokenizer().decode(ids)
    assert whole == " M 480 0 C 960 0 960 480 960 960 L - 7 481 Z"
    assert _tokenizer().encode(whole) == ids


def test_words_of_the_catalogue_and_counts_are_one_token() -> None:
    known = world()
    words = [*known.plurals, *known.plurals.values(), *known.colours, "yes", "no", "nothing"]
    forms = [form for word in words if " " not in word for form in (word, f" {word}")]
    assert {form for form in forms if len(_tokenizer().encode(form)) != 1} == set()
    assert all(len(_tokenizer().encode(str(count))) == 1 for count in range(13))


def test_printed_characters_are_one_token_each() -> None:
    for word in WORDS:
        assert all(len(_tokenizer().encode(character)) == 1 for character in word.upper() + word)


def test_large_and_signed_numbers_are_text_like_any_other() -> None:
    for text in ("961", " 1234567", "3.14", "-12", "a1b22c333", "12 apples"):
        assert _tokenizer().decode(_tokenizer().encode(text)) == text


def test_task_questions_are_short() -> None:
    lengths = [
        len(_tokenizer().encode(example.fields["question"])) / len(example.fields["question"].split())
        for _, example in examples_of("count", 100)
    ]
    assert sum(lengths) / len(lengths) < 1.4


def test_templates_are_distinct_and_use_whole_words() -> None:
    config = tokenizer_config(task_format().tokenizer_json)
    assert set(config.templates) == {f"caption.{n}" for n in ("short", "normal", "long")} | {
        "query",
        "detect",
        "point",
        "segment",
    }
    prefixes = [template.prefix for template in config.templates.values()]
    assert len(set(prefixes)) == len(prefixes)
    assert all(prefix[0] == 1 and prefix[2] == 2 and prefix[1] > 20 for prefix in prefixes)
    assert config == TokenizerConfig(0, 0, 3, 4, 5, 6, 7, 9, config.templates)


@pytest.mark.exhaustive
def test_the_same_seed_gives_the_same_tokenizer() -> None:
    tokenizer_json, config = build_tokenizer()
    assert prompt_format(tokenizer_json, config) == task_format()


def test_vocabulary_keeps_to_its_size() -> None:
    assert _tokenizer().vocab_size <= 2048
    small = train_tokenizer(["How many cats are there?"] * 10, 1536, ["cat", " cats"])
    assert TextTokenizer(TokenizerJson.from_str(small)).vocab_size <= 1536


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match="vocab_size"):
        train_tokenizer(["How many cats are there?"], 1200)
