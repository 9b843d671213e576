"""Where a chat template and the special tokens come from, and tokenizers with unusual control tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from kestrel.errors import CheckpointError, ConfigError, RequestError
from kestrel.llama.chat import chat_format
from kestrel.models.chat_files import ChatFiles, read_chat_files
from kestrel.models.control_encoder import ControlEncoder
from kestrel.models.tokenizer import TextTokenizer
from tests.llama.chat_shapes import byte_level, conversation, encoder, text_tokenizer


def folder(path: Path, template: str | None = None, **config: Any) -> Path:
    path.mkdir()
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    if config:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_a_file_comes_before_the_tokenizers_config(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    tokens = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    both = folder(tmp_path / "both", "F", chat_template="C", **tokens)
    found = read_chat_files((both,))
    assert (found.template, found.special_tokens) == ("F", {"bos_token": "<s>", "eos_token": "</s>"})
    assert read_chat_files((folder(tmp_path / "text", chat_template="C"),)).template == "C"
    assert read_chat_files((folder(tmp_path / "named", chat_template=named),)).template == "D"
    assert read_chat_files((folder(tmp_path / "no default", chat_template=named[:1]),)).template is None
    assert read_chat_files((folder(tmp_path / "nothing"),)) == ChatFiles()
    second = read_chat_files((folder(tmp_path / "tokens", **tokens), both))
    assert (second.template, second.special_tokens) == ("F", found.special_tokens)


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    (folder(tmp_path / "a") / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json is not valid JSON"):
        read_chat_files((tmp_path / "a",))


def test_a_given_template_comes_first_and_the_llama_form_last(tmp_path: Path) -> None:
    tokenizer = text_tokenizer(byte_level())
    given = tmp_path / "given.jinja"
    given.write_text("G")
    files = ChatFiles("F", "chat_template.jinja", {"bos_token": "<s>"})
    formats = [chat_format(files, tokenizer, given), chat_format(files, tokenizer), chat_format(ChatFiles(), tokenizer)]
    assert [one.template[:1] for one in formats if one is not None] == ["G", "F", "{"]
    last = formats[-1]
    assert last is not None
    parts = last.write(conversation([{"role": "user", "content": " hi\n"}])).parts
    controls = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
    assert parts[1::2] == controls
    assert "".join(parts[::2]) == "user\n\nhiassistant\n\n"
    assert chat_format(ChatFiles(), TextTokenizer(gapped([]))) is None


def test_a_template_that_is_none_is_refused_with_the_line(tmp_path: Path) -> None:
    tokenizer = text_tokenizer(byte_level())
    broken = tmp_path / "broken.jinja"
    broken.write_text("{{ a }}\n{% if %}")
    with pytest.raises(ConfigError, match=r"chat_template: .*broken.jinja is not a jinja template \(line 2"):
        chat_format(ChatFiles(), tokenizer, broken)
    with pytest.raises(ConfigError, match="cannot be read"):
        chat_format(ChatFiles(), tokenizer, tmp_path / "missing.jinja")
    with pytest.raises(CheckpointError, match=r"C is not a jinja template \(line 1.*--chat-template FILE"):
        chat_format(ChatFiles("{% if %}", "C"), tokenizer)


# ---------------------------------------------------------------------- the encoder


def gapped(tokens: list[AddedToken]) -> Tokenizer:
    """Letters with a gap between their ids."""
    made = Tokenizer(
        models.WordLevel(vocab={letter: at + 20 * (at > 4) for at, letter in enumerate("abcde<>|x")}, unk_token="a")
    )
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    made.add_tokens(tokens)
    return made


def test_ids_are_the_tokenizers_own_also_where_its_vocabulary_has_gaps() -> None:
    names = ("<|x|>", "<a>", "bb")
    inner = gapped([AddedToken(name, special=name == "<|x|>", normalized=False) for name in names])
    ids = {name: inner.token_to_id(name) for name in names}
    letters = {letter: inner.token_to_id(letter) for letter in "abcde<>|x"}
    found = ControlEncoder(TextTokenizer(inner))
    assert found.controls == {name: ids[name] for name in names[:2]}
    assert found.encode(["e", "<|x|>", "dbbe", "<a>", ""]) == [
        letters["e"], ids["<|x|>"], letters["d"], ids["bb"], letters["e"], ids["<a>"],
    ]  # fmt: skip
    assert found.encode(["<a>"]) == [letters["<"], letters["a"], letters[">"]]


def test_blanks_beside_control_tokens_are_taken_as_the_file_says() -> None:
    inner = Tokenizer.from_str(byte_level())
    inner.add_special_tokens([AddedToken("<|wide|>", lstrip=True, rstrip=True, normalized=False)])
    expected = inner.encode("the <|wide|> \ncat", add_special_tokens=False).ids
    found = ControlEncoder(TextTokenizer(Tokenizer.from_str(inner.to_str())))
    assert found.encode(["the ", "<|wide|>", " \ncat"]) == expected
    assert len(expected) < len(inner.encode("the <|im_end|> \ncat", add_special_tokens=False).ids)


def test_a_tokenizer_that_finds_control_tokens_in_text_is_not_believed() -> None:
    """No published one does; a vocabulary of whole words can."""
    made = Tokenizer(models.WordLevel(vocab={"<s>": 0, "a": 1}, unk_token="a"))
    made.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    with pytest.raises(RequestError, match="takes for control tokens"):
        ControlEncoder(TextTokenizer(made)).encode(["<s>"])


def test_long_texts_are_encoded_as_short_ones() -> None:
    found = encoder(byte_level())
    text = "the cat " * 400
    assert found.encode([text, "<s>", text])[: len(found.encode([text]))] == found.encode([text])
