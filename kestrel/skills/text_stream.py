"""Text from tokens, one at a time: whole words only, never half a character.

After each token the text so far is printed
- whole, when it ends with a line break or with a CJK ideograph;
- else up to and including its last blank.
The joined chunks equal the decoded whole, or what comes before the first stop string.
"""

from __future__ import annotations

from collections.abc import Sequence

from kestrel.skills.base import Tokenizer

REPLACEMENT = "\ufffd"
_CJK_RANGES = ((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x2F800, 0x2FA1F))
_MAX_TAIL = 64
_KEPT_TAIL = 8


class TextStream:
    """Only the ids since the last settled character are decoded again, so a long text costs linear time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tail: list[int] = []  # ids still decoded together; the first may be settled context
        self._context = ""  # the settled text at the start of the tail
        self._fresh = ""  # the rest of the tail's text, which the next token can still change
        self._settled = ""  # final text that is not fully printed yet
        self._printed = 0  # characters of settled + fresh that were handed out
        self._chunks: list[str] = []
        self._num_in_chunks = 0

    @property
    def is_stopped(self) -> bool:
        """Whether the text is complete and takes no more ids."""
        return False

    @property
    def num_printed(self) -> int:
        """Characters handed out so far."""
        return self._num_in_chunks

    @property
    def num_characters(self) -> int:
        """Whole characters so far, handed out or not: where the text of the next id begins."""
        return self._num_in_chunks + len(self.unprinted.rstrip(REPLACEMENT))

    @property
    def text(self) -> str:
        """Everything so far, printed or not."""
        return "".join(self._chunks) + self.unprinted

    @property
    def unprinted(self) -> str:
        """What was not handed out yet; its last characters may still change."""
        return (self._settled + self._fresh)[self._printed :]

    def push(self, token_id: int) -> str:
        """Take one id; return what can be printed now, often nothing."""
        before = self._fresh
        self._tail.append(token_id)
        self._fresh = self._tokenizer.decode(self._tail)[len(self._context) :]
        if self._fresh == before and not self._tokenizer.decode([token_id]):
            self._tail.pop()  # an id without text, such as a special one
            return ""
        chunk = self._print_up_to(_printable_end(self._settled + self._fresh, self._printed))
        if not self._fresh.endswith(REPLACEMENT):
            self._settle(token_id)
        elif len(self._tail) > _MAX_TAIL:
            self._settle_broken_bytes()
        return chunk

    def flush(self) -> str:
        """What is left at the end; bytes that never became a character show as U+FFFD."""
        return self._print_up_to(len(self._settled) + len(self._fresh))

    def _print_up_to(self, end: int) -> str:
        chunk = (self._settled + self._fresh)[self._printed : end]
        self._printed = max(end, self._printed)
        if chunk:
            self._chunks.append(chunk)
            self._num_in_chunks += len(chunk)
        return chunk

    def _settle(self, token_id: int) -> None:
        """The text ends with a whole character: nothing that follows can change it."""
        self._settled = self.unprinted
        self._printed = 0
        self._fresh = ""
        # Some tokenizers drop the blank of a first word, so the last id stays as context. Part of a character does not:
        # others decode a run of bytes only as a whole.
        alone = self._tokenizer.decode([token_id])
        self._context = "" if REPLACEMENT in alone else alone
        self._tail = [token_id] if self._context else []

    def _settle_broken_bytes(self) -> None:
        """Keep the tail short under a run of bytes that form no characters: cut where both parts decode the same."""
        whole = self._context + self._fresh
        for cut in range(len(self._tail) - _KEPT_TAIL, len(self._tail) - 2 * _KEPT_TAIL, -1):
            head, rest = self._tokenizer.decode(self._tail[:cut]), self._tokenizer.decode(self._tail[cut:])
            if head + rest == whole:
                self._settled += head[len(self._context) :]
                self._tail, self._context, self._fresh = self._tail[cut:], "", rest
                return


def _printable_end(text: str, printed: int) -> int:
    if len(text) > printed and (text.endswith("\n") or _is_cjk(text[-1])):
        return len(text)
    return max(text.rfind(" ", printed) + 1, printed)


def _is_cjk(character: str) -> bool:
    return any(low <= ord(character) <= high for low, high in _CJK_RANGES)


class StoppingTextStream(TextStream):
    """Text that ends right before the first of some strings, wherever tokens and characters are cut.

    The first is the one that begins first in the whole text. While what was seen last could still grow into a stop
    string it is not handed out; a found string counts once none that began before it can still be completed.
    """

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
