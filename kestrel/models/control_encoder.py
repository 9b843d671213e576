"""Text with control strings in given places to ids. In other places the same strings are plain text."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken

from kestrel.errors import RequestError
from kestrel.models.tokenizer import LONG_TEXT, TextTokenizer

BRACKETS = (("<", ">"), ("[", "]"))


class ControlEncoder:
    """A tokenizer over the same vocabulary that knows its control tokens by secret names only.

    The whole text is encoded in one pass, so that ids at the seams are those that the tokenizer's own control strings
    would give.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        added, secret = tokenizer.added_tokens, secrets.token_hex(16)
        self._origin = tokenizer
        self._tokenizer = tokenizer.without_added_tokens()
        controls = {token.content: token_id for token_id, token in added.items() if _is_control(token)}
        self.controls: Mapping[str, int] = controls
        self._names = {content: f"\ufdd0{secret}.{token_id}\ufdd1" for content, token_id in controls.items()}
        self._skip_used_ids(secret)
        renamed = {token_id: _renamed(token, self._names.get(token.content)) for token_id, token in added.items()}
        self._tokenizer.add_tokens(list(renamed.values()))
        self._ids = {self._tokenizer.token_to_id(token.content): token_id for token_id, token in renamed.items()}
        """From the ids of added tokens in the copy to their own."""
        self._control_ids = frozenset(controls.values())

    def __reduce__(self) -> tuple[Any, ...]:
        return ControlEncoder, (self._origin,)  # so that both go on sharing one vocabulary

    def _skip_used_ids(self, secret: str) -> None:
        """Added tokens are numbered from the size of the vocabulary on, which may be too low if it has gaps."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        gaps = max(vocabulary.values(), default=-1) + 1 - len(vocabulary)
        self._tokenizer.add_tokens([AddedToken(f"\ufdd0{secret}:{gap}\ufdd1") for gap in range(gaps)])

    def encode(self, parts: Sequence[str]) -> list[int]:
        """Ids of plain text and control strings in turn."""
        text = "".join(self._names[part] if at % 2 else part for at, part in enumerate(parts))
        if len(text) > LONG_TEXT:
            found = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        else:
            found = self._tokenizer.encode(text, add_special_tokens=False).ids
        ids = [self._ids.get(token_id, token_id) for token_id in found]
        if [token_id for token_id in ids if token_id in self._control_ids] != [self.controls[c] for c in parts[1::2]]:
            raise RequestError("messages", "hold text that the tokenizer takes for control tokens; write it otherwise")
        return ids


def _is_control(token: AddedToken) -> bool:
    """Marked as special, or named like markup: some files do not mark `<think>` or `<tool_call>`."""
    name = token.content
    return token.special or any(name.startswith(first) and name.endswith(last) for first, last in BRACKETS)


def _renamed(token: AddedToken, name: str | None) -> AddedToken:
    flags = {"single_word": token.single_word, "lstrip": token.lstrip, "rstrip": token.rstrip}
    if name is None:
        return AddedToken(token.content, normalized=token.normalized, **flags)
    return AddedToken(name, normalized=False, **flags)
