"""Text to ids and back. Nothing a user writes can become a control id."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as TokenizerJson

from kestrel.errors import CheckpointError, RequestError


class TextTokenizer:
    """A tokenizer.json. Its special tokens exist only as ids: their names in a text are plain text."""

    def __init__(self, tokenizer: TokenizerJson) -> None:
        """Takes `tokenizer` over: truncation and padding that its file may ask for are switched off."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.add_special_tokens(_unmarked_controls(tokenizer))
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    @classmethod
    def from_file(cls, path: Path) -> TextTokenizer:
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

    def encode(self, text: str) -> list[int]:
        try:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        except TypeError:
            raise RequestError("text", f"is not valid Unicode (got {text!r}); remove lone surrogates") from None

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special ids, and ids that have no text, are left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def decode_one(self, token_id: int) -> str:
        return self.decode((token_id,))

    def to_json(self) -> str:
        """The tokenizer.json as it is used here."""
        return self._tokenizer.to_str()

    def token_name(self, token_id: int) -> str | None:
        """The vocabulary entry itself, for messages."""
        return self._tokenizer.id_to_token(token_id)


def _unmarked_controls(tokenizer: TokenizerJson) -> list[AddedToken]:
    """Added tokens that look like `<|name|>` but are not marked special; runs of blanks and the like stay text."""
    return [
        AddedToken(token.content, special=True, normalized=False)
        for token in tokenizer.get_added_tokens_decoder().values()
        if not token.special and token.content.startswith("<|") and token.content.endswith("|>")
    ]
