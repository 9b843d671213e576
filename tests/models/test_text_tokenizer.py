"""Text to ids and back: nothing a user writes becomes a control id, and nothing is lost."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kestrel.errors import CheckpointError, RequestError
from kestrel.models.tokenizer import LONG_TEXT, TextTokenizer

FILE = Path(__file__).parents[1] / "goldens" / "md3" / "tokenizer.json"
TOKENIZER = TextTokenizer.from_file(FILE)
CONTROLS = ["<|endoftext|>"] + [f"<|md_reserved_{i}|>" for i in range(20)]


def changed(**changes: object) -> TextTokenizer:
    return TextTokenizer(Tokenizer.from_str(json.dumps(json.loads(FILE.read_text()) | changes)))


@settings(deadline=None)
@given(st.text(max_size=60))
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_names_of_special_tokens_stay_plain_text_in_another_process() -> None:
    there = pickle.loads(pickle.dumps(TOKENIZER))
    text = "".join(CONTROLS)
    assert there.encode(text) == TOKENIZER.encode(text)
    assert there.decode(there.encode(text)) == text


@settings(deadline=None)
@given(st.lists(st.sampled_from([*CONTROLS, " ", "a", "<|", "|>"]), max_size=8).map("".join))
def test_names_of_special_tokens_stay_plain_text(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert not TOKENIZER.special_ids & set(ids)
    assert TOKENIZER.decode(ids) == text


@settings(deadline=None)
@given(st.text(max_size=60))
def test_the_bytes_of_the_tokens_join_to_the_bytes_of_the_text(text: str) -> None:
    assert b"".join(TOKENIZER.token_bytes(i) for i in TOKENIZER.encode(text)) == text.encode()


def test_special_and_unknown_ids_have_no_bytes() -> None:
    assert {TOKENIZER.token_bytes(i) for i in (*TOKENIZER.special_ids, 10**6)} == {b""}


def test_a_vocabulary_of_characters_writes_bytes_and_blanks_its_own_way() -> None:
    vocab = {"▁cat": 0, "s": 1, "<0xC3>": 2, "<0xA9>": 3, "é": 4}
    steps = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "s"}
    plain = {"model": model, "decoder": {"type": "Sequence", "decoders": steps}, "added_tokens": []}
    tokenizer = changed(**plain, pre_tokenizer=None, normalizer=None, post_processor=None)
    assert [tokenizer.token_bytes(i) for i in range(5)] == [b" cat", b"s", b"\xc3", b"\xa9", "é".encode()]


def test_special_ids_decode_to_nothing_and_others_alone() -> None:
    assert frozenset(range(21)) == TOKENIZER.special_ids
    ids = TOKENIZER.encode(" hello")
    assert TOKENIZER.decode([0, 5, *ids, 9, 3]) == " hello"
    assert "".join(TOKENIZER.decode_one(i) for i in ids) == " hello"
    assert TOKENIZER.decode_one(0) == ""
    assert TOKENIZER.token_name(0) == "<|endoftext|>"


def test_vocab_size_is_one_more_than_the_largest_id() -> None:
    assert TOKENIZER.vocab_size == 319


def test_truncation_and_padding_of_the_file_are_switched_off() -> None:
    short = changed(
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<|endoftext|>",
        },
    )
    text = "a rather long sentence with many words"
    assert short.encode(text) == TOKENIZER.encode(text)


def test_controls_that_the_file_does_not_mark_are_controls_too() -> None:
    added = json.loads(FILE.read_text())["added_tokens"]
    added[3]["special"] = False
    unmarked = changed(added_tokens=added)
    assert 3 in unmarked.special_ids
    assert 3 not in unmarked.encode("<|md_reserved_2|>")
    assert unmarked.decode([3]) == ""


def test_added_tokens_that_are_text_stay_text() -> None:
    added = json.loads(FILE.read_text())["added_tokens"]
    added.append({**added[0], "id": 319, "content": "    ", "special": False})
    blanks = changed(added_tokens=added)
    assert 319 in blanks.encode("a    b")
    assert blanks.decode(blanks.encode("a    b")) == "a    b"


def test_a_lone_surrogate_is_a_request_error() -> None:
    with pytest.raises(RequestError, match="lone surrogates"):
        TOKENIZER.encode("a\ud800b")


def test_missing_and_damaged_files_name_themselves(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json does not exist.*tokenizer_path"):
        TextTokenizer.from_file(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is damaged"):
        TextTokenizer.from_file(tmp_path / "tokenizer.json")


@settings(deadline=None, max_examples=20)
@given(st.lists(st.sampled_from([*CONTROLS, "bee, ", "é", "漢", "😀", "\n"]), min_size=1, max_size=30).map("".join))
def test_a_long_text_has_the_ids_of_its_kind(text: str) -> None:
    """Long ones are taken in batches of one, which leave the interpreter to others."""
    long = text * (LONG_TEXT // len(text) + 1)
    assert TOKENIZER.encode(long) == TOKENIZER._tokenizer.encode(long, add_special_tokens=False).ids
    ids = TOKENIZER.encode(long) * (LONG_TEXT // len(TOKENIZER.encode(long)) + 1)
    assert TOKENIZER.decode(ids) == TOKENIZER._tokenizer.decode(ids, skip_special_tokens=True)
