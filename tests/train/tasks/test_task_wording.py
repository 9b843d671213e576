"""Exact answers to scenes made by hand."""

from __future__ import annotations

from random import Random

import pytest

from kestrel.train.scenes.truth import SceneObject
from kestrel.train.tasks.example import asked, listed, with_article
from kestrel.train.tasks.mix import SAMPLERS
from kestrel.train.tasks.view import REGIONS, region_of

from .driving import result_of
from .made_scenes import thing, view

CAT = thing("cat", 0.15, 0.15, 0.2)
STAR = thing("star", 0.5, 0.5, 0.12, colour="red")
SMALL_STAR = thing("star", 0.5, 0.85, 0.05, colour="blue")
WORD = thing("word", 0.85, 0.2, 0.1, colour="green", text="Tea")
HUGE = thing("apple", 0.5, 0.5, 0.5)


def _answers(family: str, *things: SceneObject, about: str = "", draws: int = 200) -> set[str]:
    """Every answer that comes up, to questions that hold a word."""
    here, rng = view(*things), Random(0)
    examples = [SAMPLERS[family](here, rng) for _ in range(draws)]
    asked_about = [e for e in examples if e is not None and about in str(e.fields).lower()]
    return {next(iter(result_of(example).values())) for example in asked_about}


def test_captions_grow_with_their_length() -> None:
    things = (SMALL_STAR, STAR, HUGE, WORD)
    assert _answers("caption_short", *things, draws=1) == {"An apple, a word and 2 stars."}
    assert _answers("caption_normal", *things, draws=1) == {
        'An apple, the green word "Tea", a red star and a blue star on a green background.'
    }
    long = (
        'A picture of 4 objects on a green background: an apple in the center, the green word "Tea" in the top right, '
        "a red star in the center and a blue star at the bottom."
    )
    assert _answers("caption_long", *things, draws=1) == {long}


def test_captions_of_one_thing_and_of_nothing() -> None:
    assert _answers("caption_short", CAT, draws=1) == {"A cat."}
    assert _answers("caption_long", CAT, draws=1) == {
        "A picture of 1 object on a green background: a cat in the top left."
    }
    assert _answers("caption_short", draws=1) == {"An empty picture."}
    assert _answers("caption_normal", draws=1) == {"An empty picture with a green background."}


def test_alike_things_are_counted_in_captions() -> None:
    twins = (STAR, thing("star", 0.2, 0.2, 0.12, colour="red"))
    assert _answers("caption_normal", *twins, draws=1) == {"2 red stars on a green background."}


def test_printed_words_are_quoted_one_by_one() -> None:
    words = (WORD, thing("word", 0.2, 0.8, 0.1, colour="green", text="Go"))
    assert _answers("caption_normal", *words, draws=1) == {
        'The green word "Tea" and the green word "Go" on a green background.'
    }


def test_the_only_object_is_named() -> None:
    assert _answers("what", CAT, about="this") == {"cat"}
    assert _answers("what", CAT, about="top left") == {"cat"}
    assert _answers("what", CAT, about="bottom right") == {"nothing"}
    assert _answers("contents", CAT, STAR) == {"a cat and a star"}


def test_colours_are_told_and_missing_things_have_none() -> None:
    assert _answers("colour", CAT, STAR, about="star") == {"red"}
    assert _answers("colour", CAT, STAR, about="heart") == {"no"}
    assert _answers("colour", STAR, SMALL_STAR, about="star") == set()
    assert _answers("background", CAT) == {"green"}


def test_places_are_named_and_missing_things_have_none() -> None:
    assert _answers("where", CAT, STAR, SMALL_STAR, about=" cat") == {"top left"}
    assert _answers("where", CAT, STAR, SMALL_STAR, about="blue star") == {"bottom"}
    assert _answers("where", CAT, about="dog", draws=3000) == {"no"}


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("is the cat left of the red star", "yes"),
        ("is the cat to the right of the red star", "no"),
        ("is the cat above the red star", "yes"),
        ("is the red star under the cat", "yes"),
        ("is the blue star over the red star", "no"),
    ],
)
def test_two_things_are_compared_by_place(question: str, answer: str) -> None:
    assert _answers("beside", CAT, STAR, SMALL_STAR, about=question, draws=3000) == {answer}


def test_things_side_by_side_are_not_asked_to_be_above_each_other() -> None:
    row = (thing("cat", 0.2, 0.5), thing("dog", 0.8, 0.52))
    assert _answers("beside", *row, about="above") == set()
    assert _answers("beside", *row, about="cat to the left of the dog") == {"yes"}


def test_the_bigger_and_the_smaller_are_told_apart() -> None:
    assert _answers("bigger", CAT, HUGE, about="bigger") == {"apple"}
    assert _answers("bigger", CAT, HUGE, about="smaller") == {"cat"}
    assert _answers("bigger", CAT, HUGE, about="largest") == {"apple"}
    assert _answers("bigger", CAT, thing("dog", 0.8, 0.8, 0.22)) == set()


def test_text_is_read_by_what_singles_it_out() -> None:
    number = thing("number", 0.2, 0.8, 0.1, colour="red", text="1924")
    assert _answers("read", WORD) == {"Tea"}
    assert _answers("read", WORD, number, about="number") == {"1924"}
    assert _answers("read", WORD, number, about="green") == {"Tea"}
    assert _answers("read", WORD, number, about="the text say") == set()
    assert _answers("read", CAT) == {"no"}


def test_all_nine_regions_lie_where_they_are_called() -> None:
    centres = (1 / 6, 1 / 2, 5 / 6)
    assert tuple(region_of(x, y) for y in centres for x in centres) == REGIONS


def test_lists_and_articles() -> None:
    assert [listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])] == ["a", "a and b", "a, b and c"]
    assert [with_article("owl"), with_article("cat")] == ["an owl", "a cat"]


def test_a_question_is_typed_in_many_ways() -> None:
    rng = Random(0)
    typed = {asked(rng, ["How many {things} are there?"], things="cats") for _ in range(300)}
    assert "How many cats are there?" in typed
    assert "how many cats are there?" in typed
    assert "How many cats are there" in typed
    assert len(typed) >= 6
