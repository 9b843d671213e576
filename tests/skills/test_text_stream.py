from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrel.skills.base import Tokenizer
from kestrel.skills.states import TextStream, UnreadText

from .model_profiles import golden_cases, golden_tokenizer

TOKENIZER = golden_tokenizer("md2")
STREAMING = golden_cases("md2")["streaming"]
IDEOGRAPHS = (("\u4e00", "\u9fff"), ("\u3400", "\u4dbf"), ("\U0002f800", "\U0002fa1f"))
ANY_IDS = st.lists(st.integers(0, 318), max_size=80)


def chunks_of(ids: Sequence[int], tokenizer: Tokenizer = TOKENIZER) -> list[str]:
    stream = TextStream(tokenizer)
    chunks = [stream.push(token_id) for token_id in ids]
    return [chunk for chunk in (*chunks, stream.flush()) if chunk]


def chunks_by_decoding_everything(ids: Sequence[int]) -> list[str]:
    """The rule as stated, with the whole line decoded again after every token."""
    chunks: list[str] = []
    cache: list[int] = []
    printed = 0
    for token_id in ids:
        cache.append(token_id)
        text = TOKENIZER.decode(cache)
        if text.endswith("\n"):
            chunks.append(text[printed:])
            cache, printed = [], 0
        elif text and any(low <= text[-1] <= high for low, high in IDEOGRAPHS):
            chunks.append(text[printed:])
            printed = len(text)
        else:
            end = text.rfind(" ", printed) + 1
            if end > printed:
                chunks.append(text[printed:end])
                printed = end
    chunks.append(TOKENIZER.decode(cache)[printed:])
    return [chunk for chunk in chunks if chunk]


@pytest.mark.parametrize("case", STREAMING, ids=[case["text"].split()[0] for case in STREAMING])
def test_chunks_equal_the_reference(case: dict) -> None:
    assert chunks_of(case["token_ids"]) == case["chunks"]


@given(st.text(max_size=60))
def test_joined_chunks_equal_the_text(text: str) -> None:
    assert "".join(chunks_of(TOKENIZER.encode(text))) == text


@given(ANY_IDS)
def test_chunks_of_any_ids_follow_the_stated_rule(ids: list[int]) -> None:
    assert chunks_of(ids) == chunks_by_decoding_everything(ids)


@given(ANY_IDS)
def test_text_is_the_full_decode_with_and_without_flush(ids: list[int]) -> None:
    stream = TextStream(TOKENIZER)
    for token_id in ids:
        stream.push(token_id)
    before_flush = stream.text
    stream.flush()
    assert before_flush == stream.text == TOKENIZER.decode(ids)


@given(st.text(alphabet="aé 猫🙂\n", max_size=40))
def test_no_chunk_holds_half_a_character(text: str) -> None:
    assert all("\ufffd" not in chunk for chunk in chunks_of(TOKENIZER.encode(text)))


class CountingTokenizer:
    """Counts decoded ids, the cost of a stream."""

    def __init__(self) -> None:
        self.num_decoded = 0

    def encode(self, text: str) -> list[int]:
        return TOKENIZER.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        self.num_decoded += len(ids)
        return TOKENIZER.decode(ids)


@pytest.mark.parametrize(
    "pattern",
    [[92, 89], [193], [193, 274, 268], [7], [193, 7, 7, 7], [116, 185, 7]],
    ids=["a word without blanks", "lead bytes", "half emoji", "special", "byte then special", "broken bytes"],
)
def test_cost_stays_linear_whatever_is_generated(pattern: list[int]) -> None:
    tokenizer = CountingTokenizer()
    ids = pattern * (2000 // len(pattern))
    assert "".join(chunks_of(ids, tokenizer)) == TOKENIZER.decode(ids)
    assert tokenizer.num_decoded < 80 * len(ids)


class BlankDroppingTokenizer:
    """Words with a leading blank each; the blank of the first word is dropped when decoding."""

    words = (" one", " two", "\n", " three")

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.words[i] for i in ids).removeprefix(" ")


def test_blanks_survive_a_tokenizer_that_drops_the_first() -> None:
    ids = [0, 1, 2, 3, 0]
    assert "".join(chunks_of(ids, BlankDroppingTokenizer())) == BlankDroppingTokenizer().decode(ids)


class ByteRunTokenizer:
    """Every id is a byte; a run of bytes decodes as a whole or to one U+FFFD per byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        try:
            return bytes(ids).decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(ids)


@given(st.text(max_size=30))
def test_characters_survive_a_tokenizer_that_decodes_byte_runs_whole(text: str) -> None:
    tokenizer = ByteRunTokenizer()
    assert "".join(chunks_of(tokenizer.encode(text), tokenizer)) == text


@given(ANY_IDS)
def test_text_that_nobody_reads_is_the_text_that_is_read(ids: list[int]) -> None:
    stream = UnreadText(TOKENIZER)
    assert [*map(stream.push, ids), stream.flush()] == [""] * (len(ids) + 1)
    assert stream.text == "".join(chunks_of(ids))
