"""Stop strings against str.find on the whole text, whatever the tokens are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrel.skills.base import Tokenizer
from kestrel.skills.states import StoppingTextStream, TextStream
from tests.cpu_time import least_cpu_s
from tests.exhaustive import given_examples

from .model_profiles import golden_tokenizer

TOKENIZER = golden_tokenizer("md2")
LETTERS = "ab é猫🙂\n"
TEXTS = st.text(alphabet=LETTERS, max_size=40)
STOPS = st.lists(st.text(alphabet=LETTERS, min_size=1, max_size=5), min_size=1, max_size=4)


class PieceTokenizer:
    """Every id is some bytes; broken characters decode to U+FFFD as a byte-level vocabulary does."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self._pieces[i] for i in ids).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]


def cut_by_hand(text: str, stops: Sequence[str]) -> str:
    found = [text.find(stop) for stop in stops if stop in text]
    return text[: min(found)] if found else text


def run(tokenizer: Tokenizer, ids: Sequence[int], stops: Sequence[str]) -> tuple[list[str], StoppingTextStream, int]:
    """(chunks, the stream, ids taken) when feeding ends as soon as the stream has stopped."""
    stream = StoppingTextStream(tokenizer, stops)
    chunks, taken = [], 0
    for token_id in ids:
        chunks.append(stream.push(token_id))
        taken += 1
        if stream.is_stopped:
            break
    return [*chunks, stream.flush()], stream, taken


def check(tokenizer: Tokenizer, ids: Sequence[int], stops: Sequence[str]) -> None:
    text = tokenizer.decode(ids)
    expected = cut_by_hand(text, stops)
    chunks, stream, _ = run(tokenizer, ids, stops)
    assert stream.text == expected
    assert "".join(chunks) == expected
    assert stream.is_stopped == (expected != text)
    assert stream.stop_text == min((s for s in stops if text.startswith(s, len(expected))), key=len, default=None)
    assert stream.num_printed == len(expected)


@given(TEXTS, STOPS)
def test_tokens_of_a_real_vocabulary(text: str, stops: list[str]) -> None:
    check(TOKENIZER, TOKENIZER.encode(text), stops)


@given_examples(100, 2000, TEXTS, STOPS, st.data())
def test_any_cut_into_tokens_even_inside_characters(text: str, stops: list[str], data: st.DataObject) -> None:
    octets = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(octets)))) | {0, len(octets)})
    pieces = [octets[a:b] for a, b in pairwise(cuts)]
    check(PieceTokenizer(pieces), range(len(pieces)), stops)


@given(st.lists(st.integers(0, 318), max_size=60), STOPS)
def test_any_ids_even_those_that_form_no_characters(ids: list[int], stops: list[str]) -> None:
    check(TOKENIZER, ids, stops)


@given(TEXTS)
def test_without_a_match_the_chunks_are_those_of_a_plain_stream(text: str) -> None:
    ids = TOKENIZER.encode(text)
    plain = TextStream(TOKENIZER)
    expected = [*(plain.push(token_id) for token_id in ids), plain.flush()]
    assert run(TOKENIZER, ids, ["Z"])[0] == expected


@given(TEXTS, st.text(alphabet=LETTERS, min_size=1, max_size=4))
def test_a_single_stop_string_ends_with_the_token_that_completes_it(text: str, stop: str) -> None:
    tokenizer = PieceTokenizer([character.encode() for character in text])
    _, stream, taken = run(tokenizer, range(len(text)), [stop])
    if stop in text:
        assert taken == text.find(stop) + len(stop)
    else:
        assert not stream.is_stopped


def test_nothing_that_may_become_a_stop_string_is_printed() -> None:
    tokenizer = PieceTokenizer([b"one ", b"a ", b"b ", b"c ", b"a ", b"b ", b"stop"])
    stream = StoppingTextStream(tokenizer, ["a b stop"])
    assert [stream.push(i) for i in range(7)] == ["one ", "", "", "a b c ", "", "", ""]
    assert stream.is_stopped
    assert stream.text == "one a b c "


def test_a_longer_string_that_began_first_wins_over_one_inside_it() -> None:
    tokenizer = PieceTokenizer([b"ab", b"c", b"d", b"x"])
    assert run(tokenizer, [0, 1, 2], ["abcd", "c"])[1].text == ""
    chunks, stream, taken = run(tokenizer, [0, 1, 3, 3], ["abcd", "c"])
    assert (stream.text, "".join(chunks), taken) == ("ab", "ab", 3)
    chunks, stream, _ = run(tokenizer, [0, 1], ["abcd", "c"])  # the budget ends it before that is clear
    assert (stream.text, "".join(chunks), stream.is_stopped) == ("ab", "ab", True)


@pytest.mark.parametrize("length", [50, 1000])
def test_long_stop_strings_across_many_tokens(length: int) -> None:
    tokenizer = PieceTokenizer([b"a", b"b "])
    stop = "a" * length
    text = "".join("a" * n + "b " for n in (3, length - 1, length, 2))
    ids = [0 if character == "a" else 1 for character in text.replace(" ", "")]
    check(tokenizer, ids, [stop])


def test_a_stopped_stream_takes_nothing_more() -> None:
    tokenizer = PieceTokenizer([b"x", b"stop", b"more "])
    stream = StoppingTextStream(tokenizer, ["stop"])
    assert [stream.push(i) for i in (0, 1, 2, 2)] == ["", "x", "", ""]
    assert (stream.flush(), stream.text) == ("", "x")


def test_long_stops_do_not_slow_down_a_text_without_blanks() -> None:
    """The worker runs this for every token of every row."""

    def cost(stop: str) -> float:
        return least_cpu_s(lambda: push_all([stop + letter for letter in "cdef"]))

    def push_all(stops: list[str]) -> None:
        stream = StoppingTextStream(PieceTokenizer([b"a"]), stops)
        for _ in range(2000):
            stream.push(0)
        stream.flush()
        assert stream.text == "a" * 2000

    assert cost("b" * 999) < 10 * cost("b")
