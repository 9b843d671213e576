"""Text as ids: it looks like the list of its tokens."""

from __future__ import annotations

from kestrel.tokens import ImageSpan, Text, TextToken, has_pictures, ids_if_text, num_positions

IDS = [5, 0, 5, 70_000]
TOKENS = [TextToken(i) for i in IDS]


def test_text_is_the_sequence_of_its_tokens() -> None:
    text = Text(IDS)
    assert text == TOKENS
    assert text == Text(tuple(IDS))
    assert text != Text(IDS[:-1])
    assert [text[i] for i in range(-4, 4)] == [*TOKENS, *TOKENS]
    assert text[1:3] == TOKENS[1:3]
    assert isinstance(text[1:3], Text)
    assert [*text, *text] == [*TOKENS, *TOKENS]
    assert len(text) == num_positions(text) == 4


def test_what_is_cut_off_or_handed_in_does_not_grow_with_it() -> None:
    ids = [1, 2]
    text = Text(ids)
    part = text[:]
    text.append(TextToken(3))
    assert (text, part, ids) == (Text([1, 2, 3]), Text([1, 2]), [1, 2])


def test_ids_are_those_of_text_alone() -> None:
    assert ids_if_text(Text(IDS)) == ids_if_text(TOKENS) == IDS
    assert ids_if_text([*TOKENS, ImageSpan("d", 3)]) is None
    assert has_pictures([*TOKENS, ImageSpan("d", 3)])
    assert not has_pictures(Text(IDS))
