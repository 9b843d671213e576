"""Tokenizers made of GGUF metadata: the ids that published vocabularies expect, and small ones by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kestrel.errors import CheckpointError
from kestrel.models.gguf.tokenizer import read_tokenizer
from kestrel.models.tokenizer import TextTokenizer
from tests.exhaustive import sweep
from tests.models.gguf.files import write_gguf

BETWEEN = "\n__ggml_vocab_test__\n"
ALWAYS = ["llama-spm"]
PUBLISHED = [
    *ALWAYS, "qwen2", "command-r", "deepseek-coder", "falcon", "gpt-2", "llama-bpe", "mpt", "phi-3", "qwen35",
    "refact", "starcoder",
]  # fmt: skip


@sweep("name", PUBLISHED, always=ALWAYS)
def test_texts_have_the_ids_that_the_vocabulary_expects(name: str, vocabularies: Path) -> None:
    path = vocabularies / f"ggml-vocab-{name}.gguf"
    texts = Path(f"{path}.inp").read_text(encoding="utf-8").split(BETWEEN)
    lines = Path(f"{path}.out").read_text(encoding="utf-8").splitlines()
    expected = [[int(number) for number in line.split()] for line in lines]
    assert len(texts) - 1 <= len(expected) <= len(texts)
    assert len(expected) > 30
    tokenizer = TextTokenizer.from_file(path)
    for text, ids in zip(texts, expected, strict=False):
        assert tokenizer.encode(text) == ids, repr(text)


PIECES = ["<unk>", "<s>", "</s>", "<0xC3>", "<0xA9>", "▁", "a", "b", "c", "▁a", "ab", "▁ab", "bc", "<tool>"]
SCORES = [0.0, 0.0, 0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -9.0, -4.0, -3.0, -2.0, -1.0, 0.0]
KINDS = [2, 3, 3, 6, 6, 1, 1, 1, 1, 1, 1, 1, 1, 4]
SENTENCEPIECE = {
    "general.architecture": "llama", "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": PIECES,
    "tokenizer.ggml.scores": SCORES, "tokenizer.ggml.token_type": KINDS, "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
}  # fmt: skip


def sentencepiece(folder: Path, **changes: Any) -> TextTokenizer:
    values = SENTENCEPIECE | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return TextTokenizer.from_file(write_gguf(folder / "v.gguf", values))


def names(tokenizer: TextTokenizer, text: str) -> list[str | None]:
    return [tokenizer.token_name(number) for number in tokenizer.encode(text)]


def test_pieces_of_higher_scores_are_made_first(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    assert names(tokenizer, "abc") == ["▁a", "bc"], "bc is made before ab"
    assert names(tokenizer, "ab ab") == ["▁ab", "▁ab"]
    assert names(tokenizer, "aé") == ["▁a", "<0xC3>", "<0xA9>"]
    assert names(tokenizer, "a<tool>b") == ["▁a", "<tool>", "▁", "b"]
    assert tokenizer.start_id == 1, "unless the file says otherwise"
    assert tokenizer.special_ids == {0, 1, 2}
    assert not {0, 1, 2} & set(tokenizer.encode("a</s>")[:1])
    for text in ("ab abc", "é a"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_blank_before_a_text_and_a_start_id_can_be_left_out(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path, add_space_prefix=False, add_bos_token=False)
    assert names(tokenizer, "ab ab") == ["ab", "▁ab"]
    assert tokenizer.start_id is None
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"


@pytest.mark.parametrize("name", ["<stop>", "stop"])
def test_a_control_token_never_comes_of_a_text(name: str, tmp_path: Path) -> None:
    """This kind takes whole words: a word as a control token would be found in texts."""
    letters = sorted(set("<stopg>"))
    values = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": [*letters, "go", name],
        "tokenizer.ggml.token_type": [*[1] * len(letters), 1, 3], "tokenizer.ggml.merges": ["g o"],
    }  # fmt: skip
    path = write_gguf(tmp_path / "v.gguf", values)
    if name == "stop":
        with pytest.raises(CheckpointError, match=r"v\.gguf: texts of users could become the control token 'stop'"):
            TextTokenizer.from_file(path)
        return
    tokenizer = TextTokenizer.from_file(path)
    assert names(tokenizer, "go<stop>") == ["go", "<", "s", "t", "o", "p", ">"]
    assert tokenizer.special_ids == {len(letters) + 1}


@pytest.mark.parametrize(("given", "expected"), [({}, 0), ({"tokenizer.ggml.add_bos_token": False}, None)])
def test_llama_3_opens_texts_unless_told_otherwise(given: dict[str, Any], expected: int | None, tmp_path: Path) -> None:
    values = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": ["<|b|>", "a", "b", "ab"],
        "tokenizer.ggml.token_type": [3, 1, 1, 1], "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.bos_token_id": 0,
    }  # fmt: skip
    path = write_gguf(tmp_path / "v.gguf", values | given)
    assert TextTokenizer.from_file(path).start_id == expected
    assert read_tokenizer(path).encode("ab", add_special_tokens=False).ids == [3]
