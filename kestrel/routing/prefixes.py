"""Names for the beginnings of a request's context, without a tokenizer.

Each name is a digest of the one before it and of what follows, so two requests share names exactly as far as they begin
alike. What the engine makes of the fields may begin alike for longer or shorter; a wrong guess costs a cache hit alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

BLOCK_BYTES = 256
"""Of the prompt, about 64 tokens."""
MAX_BLOCKS = 128
KEY_BYTES = 16
PROMPT_FIELDS = ("tools", "messages", "prompt", "question", "object", "length", "text", "token_ids")
"""What a prompt is made of, in its order there."""


@dataclass(frozen=True)
class PrefixKeys:
    """Digests of ever longer beginnings of a request, shortest first: each picture, then blocks of the prompt."""

    pictures: tuple[bytes, ...] = ()
    blocks: tuple[bytes, ...] = ()

    def __iter__(self) -> Iterator[bytes]:
        yield from self.pictures
        yield from self.blocks


def prefix_keys(
    fields: Mapping[str, Any], pictures: Sequence[str], *, adapter: str | None, tenant: str | None
) -> PrefixKeys:
    """`pictures` are digests of the request's pictures in order.

    Every key depends on tenant, adapter and `cache_salt`: contexts of different ones share nothing. A request whose
    prompt is shorter than a block, without pictures, has no key.
    """
    key = _digest(b"", repr((tenant, adapter, fields.get("cache_salt"))).encode())
    of_pictures: list[bytes] = []
    for picture in pictures:
        of_pictures.append(key := _digest(key, picture.encode()))
    prompt = _prompt(fields)
    of_blocks: list[bytes] = []
    for start in range(0, len(prompt) - BLOCK_BYTES + 1, BLOCK_BYTES):
        of_blocks.append(key := _digest(key, prompt[start : start + BLOCK_BYTES]))
    return PrefixKeys(tuple(of_pictures), tuple(of_blocks))


def _digest(before: bytes, added: bytes) -> bytes:
    return blake2b(before + added, digest_size=KEY_BYTES).digest()


def _prompt(fields: Mapping[str, Any]) -> bytes:
    """The beginning of what stands in the fields; no more of it than is looked at is copied."""
    most = BLOCK_BYTES * MAX_BLOCKS
    prompt = bytearray()
    for name in PROMPT_FIELDS:
        if fields.get(name) is not None:
            for piece in _pieces(fields[name], most):
                prompt += piece
                if len(prompt) >= most:
                    return bytes(prompt[:most])
    return bytes(prompt)


def _pieces(value: Any, most: int) -> Iterator[bytes]:
    """Texts and numbers in order, with an end behind each. A picture says only that it stands there."""
    if isinstance(value, str):
        yield value[:most].encode(errors="surrogatepass")
        yield b"\0"
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _pieces(name, most)
            yield from _pieces(inner, most)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _pieces(inner, most)
    elif isinstance(value, (int, float)):
        yield b"%r\0" % value
    else:
        yield b"\1"
