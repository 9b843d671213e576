"""What the files beside a model's weights say about conversations: its chat template and its special tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kestrel.errors import CheckpointError
from kestrel.models.locate import read_object

TEMPLATE_NAME = "chat_template.jinja"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class ChatFiles:
    """A template's text, if there is one, and the special tokens by the names that templates have for them."""

    template: str | None = None
    origin: str = ""
    """The file that the template is from, for messages."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)


def read_chat_files(folders: Iterable[Path]) -> ChatFiles:
    """From the first folder that has a template: a file of its own before a field of tokenizer_config.json."""
    found = ChatFiles()
    for folder in dict.fromkeys(folders):
        config = read_object(folder / TOKENIZER_CONFIG_NAME) or {}
        tokens = found.special_tokens or _special_tokens(config)
        template = folder / TEMPLATE_NAME
        if template.is_file():
            return ChatFiles(_read(template), str(template), tokens)
        text = _template_in(config.get("chat_template"))
        if text is not None:
            return ChatFiles(text, f"{folder / TOKENIZER_CONFIG_NAME}: chat_template", tokens)
        found = ChatFiles(special_tokens=tokens)
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as text ({error}); download it again") from error


def _template_in(value: Any) -> str | None:
    """A template, or the default one of a list of named ones."""
    if isinstance(value, list):
        named = {one.get("name"): one.get("template") for one in value if isinstance(one, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Each is a string, or an object with its `content`."""
    given = {name: config.get(name) for name in SPECIAL_TOKENS}
    contents = {name: value.get("content") if isinstance(value, dict) else value for name, value in given.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}
