"""Text that ends right before the first of some strings, wherever tokens and characters are cut.

The first is the one that begins first in the whole text. While what was seen last could still grow into a stop string
it is not handed out; a found string counts once none that began before it can still be completed.
"""

from __future__ import annotations

from collections.abc import Sequence

from kestrel.skills.base import Tokenizer
from kestrel.skills.text_stream import REPLACEMENT, TextStream


class StoppingTextStream(TextStream):
    """Prints as a TextStream does, but never a part of a stop string that is completed later."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        super().__init__(tokenizer)
        self._stops = stops
        self._held = ""  # printable text that is not handed out yet
        self._num_released = 0
        self._end: int | None = None  # where the text stops

    @property
    def text(self) -> str:
        return super().text[: self._end]

    @property
    def num_printed(self) -> int:
        return self._num_released

    @property
    def is_stopped(self) -> bool:
        return self._end is not None

    def push(self, token_id: int) -> str:
        if self.is_stopped:
            return ""
        self._held += super().push(token_id)
        seen = self._held + self.unprinted.rstrip(REPLACEMENT)  # half a character can still become any other
        found, open_from = first_stop(seen, self._stops), open_stop(seen, self._stops)
        if found is not None and found <= open_from:
            self._end = self._num_released + found
            return self._release(seen, found)
        return self._release(self._held, min(open_from, len(self._held)))

    def flush(self) -> str:
        if self.is_stopped:
            return ""
        self._held += super().flush()
        found = first_stop(self._held, self._stops)
        if found is not None:
            self._end = self._num_released + found
        return self._release(self._held, len(self._held) if found is None else found)

    def _release(self, text: str, end: int) -> str:
        self._held = text[end:]
        self._num_released += end
        return text[:end]


def text_stream(tokenizer: Tokenizer, stops: Sequence[str]) -> TextStream:
    return StoppingTextStream(tokenizer, stops) if stops else TextStream(tokenizer)


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the first stop string begins."""
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return min(found, default=None)


def open_stop(text: str, stops: Sequence[str]) -> int:
    """Where the longest ending begins that could still grow into a stop string; the end of the text if none can."""
    first = len(text)
    for stop in stops:
        at = text.find(stop[0], max(0, len(text) - len(stop) + 1), first)
        while at >= 0 and not stop.startswith(text[at:]):
            at = text.find(stop[0], at + 1, first)
        first = at if at >= 0 else first
    return first
