from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from kestrel.errors import ConfigError
from kestrel.train.scenes.catalogue import (
    COLOUR_NAMES,
    COLOUR_RGB,
    EMOJI_KINDS,
    KINDS,
    SHAPE_KINDS,
    WORDS,
    colour_distance,
    colour_table,
    decode_text,
    encode_text,
    has_colour,
    is_emoji,
    is_shape,
    is_text,
    kind_index,
    word_table,
)
from kestrel.train.scenes.truth import MAX_TEXT


def test_catalogue_has_sixty_kinds_with_different_names_and_plurals():
    assert len(KINDS) >= 60
    assert len(EMOJI_KINDS) >= 50
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    assert len({kind.plural for kind in KINDS}) == len(KINDS)
    assert len({kind.emoji for kind in EMOJI_KINDS}) == len(EMOJI_KINDS)


def test_names_and_indices_lead_to_each_other():
    assert [kind_index(KINDS[index].name) for index in range(len(KINDS))] == list(range(len(KINDS)))
    assert KINDS[kind_index("butterfly")].plural == "butterflies"


def test_every_kind_is_exactly_one_of_emoji_shape_and_text():
    for index in range(len(KINDS)):
        assert is_emoji(index) + is_shape(index) + is_text(index) == 1
        assert has_colour(index) == (not is_emoji(index))
    assert sum(is_shape(index) for index in range(len(KINDS))) == len(SHAPE_KINDS) == 8


def test_unknown_kind_is_refused_by_name():
    with pytest.raises(ConfigError, match="'unicorn'"):
        kind_index("unicorn")


def test_colours_are_well_apart():
    table = colour_table(COLOUR_RGB)
    assert len(COLOUR_NAMES) == 10
    for first, second in combinations(range(len(table)), 2):
        assert colour_distance(table[first], table[second]) > 0.2, (COLOUR_NAMES[first], COLOUR_NAMES[second])
    assert colour_distance(np.zeros(3), np.ones(3)) == pytest.approx(1, abs=0.01)


def test_words_are_many_short_and_no_names_of_kinds_or_colours():
    assert len(set(WORDS)) == len(WORDS) >= 200
    assert {len(word) for word in WORDS} == set(range(2, MAX_TEXT + 1))
    assert all(word.isascii() and word.islower() and word.isalpha() for word in WORDS)
    assert not set(WORDS) & ({kind.name for kind in KINDS} | set(COLOUR_NAMES))


def test_texts_survive_encoding():
    for text in ("go", "MOUNTAIN", "Quiz", "0", "9999"):
        assert decode_text(encode_text(text)) == text
    assert [decode_text(codes) for codes in word_table()[WORDS.index("lake")]] == ["lake", "LAKE", "Lake"]


@pytest.mark.parametrize("text", ["elephants", "a b", "naïve"])
def test_texts_that_cannot_be_printed_are_refused(text: str):
    with pytest.raises(ConfigError, match="text"):
        encode_text(text)
