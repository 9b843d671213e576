"""Text to ids and back. Nothing a user writes can become a control id."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as TokenizerJson

from kestrel.errors import CheckpointError, RequestError, shown
from kestrel.models.gguf.header import is_gguf
from kestrel.models.gguf.tokenizer import read_tokenizer

BLANK = "Ġ"
"""How byte-level vocabularies write the blank before a word."""
LONG_TEXT = 1024
"""Characters or ids from which a batch of one is taken: alone, a text holds the interpreter while it is worked on."""


class TextTokenizer:
    """A tokenizer.json. Its special tokens exist only as ids: their names in a text are plain text."""

    def __init__(self, tokenizer: TokenizerJson) -> None:
        """Takes `tokenizer` over: truncation and padding that its file may ask for are switched off."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.start_id = next(iter(tokenizer.encode("", add_special_tokens=True).ids), None)
        """What the file puts before a text; nothing where it is None."""
        tokenizer.add_special_tokens(_unmarked_controls(tokenizer))
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added_text = {token_id: token.content for token_id, token in added.items() if not token.special}
        self._is_byte_level = '"ByteLevel"' in json.dumps(json.loads(tokenizer.to_str())["decoder"])

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The library's own pickles forget that special tokens in a text are text."""
        self.__dict__.update(state)
        self._tokenizer.encode_special_tokens = True

    @classmethod
    def from_file(cls, path: Path) -> TextTokenizer:
        """A tokenizer.json, or the vocabulary of a .gguf file."""
        if is_gguf(path):
            return cls(read_tokenizer(path))
        if not path.is_file():
            raise CheckpointError(
                f"{path} does not exist; pass tokenizer_path, or put tokenizer.json beside the weights"
            )
        try:
            return cls(TokenizerJson.from_file(str(path)))
        except Exception as error:  # the library raises nothing more precise
            raise CheckpointError(f"{path} is damaged or not a tokenizer.json ({error}); download it again") from error

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def added_tokens(self) -> dict[int, AddedToken]:
        """Tokens that are found in a text before it is split, by id."""
        return self._tokenizer.get_added_tokens_decoder()

    def without_added_tokens(self) -> TokenizerJson:
        """Another tokenizer over the same vocabulary, which is not copied."""
        other = TokenizerJson(self._tokenizer.model)
        if self._tokenizer.normalizer is not None:
            other.normalizer = self._tokenizer.normalizer
        if self._tokenizer.pre_tokenizer is not None:
            other.pre_tokenizer = self._tokenizer.pre_tokenizer
        return other

    def encode(self, text: str) -> list[int]:
        try:
            if len(text) > LONG_TEXT:
                return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        except TypeError:
            raise RequestError("text", f"is not valid Unicode (got {shown(text)}); remove lone surrogates") from None

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special ids, and ids that have no text, are left out."""
        if len(ids) > LONG_TEXT:
            return self._tokenizer.decode_batch([list(ids)], skip_special_tokens=True)[0]
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one id stands for, be they whole characters or not; none for special and unknown ids."""
        name = self._tokenizer.id_to_token(token_id)
        if name is None or token_id in self.special_ids:
            return b""
        if token_id in self._added_text:
            return self._added_text[token_id].encode()
        alphabet = _byte_level_alphabet()
        if self._is_byte_level and all(character in alphabet for character in name):
            return bytes(alphabet[character] for character in name)
        if (octet := _SINGLE_BYTE.fullmatch(name)) is not None:
            return bytes.fromhex(octet[1])
        return name.replace("\u2581", " ").encode()

    def decode_one(self, token_id: int) -> str:
        return self.decode((token_id,))

    def to_json(self) -> str:
        """The tokenizer.json as it is used here."""
        return self._tokenizer.to_str()

    def token_name(self, token_id: int) -> str | None:
        """The vocabulary entry itself, for messages."""
        return self._tokenizer.id_to_token(token_id)


_SINGLE_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
"""How vocabularies of characters write a byte that is no character."""


@lru_cache(maxsize=1)
def _byte_level_alphabet() -> dict[str, int]:
    """Byte-level vocabularies write visible Latin-1 bytes as themselves and the others from U+0100 on, in order."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _unmarked_controls(tokenizer: TokenizerJson) -> list[AddedToken]:
    """Added tokens that look like `<|name|>` but are not marked special; runs of blanks and the like stay text."""
    return [
        AddedToken(token.content, special=True, normalized=False)
        for token in tokenizer.get_added_tokens_decoder().values()
        if not token.special and token.content.startswith("<|") and token.content.endswith("|>")
    ]
