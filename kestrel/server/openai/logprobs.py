"""Log-probabilities: how many may be asked for, and the API's two shapes of them, a list of tokens (chat) and
columns (completions)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kestrel.errors import RequestError
from kestrel.server.state import ServerState
from kestrel.settings import MAX_LOGPROBS
from kestrel.skills.base import Tokenizer
from kestrel.skills.states import TextStream
from kestrel.threads import Pace

Entry = Mapping[str, Any]
"""One token as `kestrel.skills.logprobs` describes it."""
LARGE_LOGPROBS = 4096
"""More than so many are written off the event loop."""


# ---------------------------------------------------------------------- how many


def require_few_logprobs(
    state: ServerState, name: str, fields: Mapping[str, Any], prompts: Sequence[str | Sequence[int]], num_choices: int
) -> int:
    """The most that the answer can hold, of so many choices of each prompt. Raises when that is more than allowed.

    `name` is what the client calls the number of likely tokens, `fields` are the engine's. An empty prompt stands for
    one that is not shown.
    """
    num_top = fields.get("logprobs")
    if num_top is None:
        return 0
    engine = state.require_serving()
    longest = engine.max_model_length
    num_new = fields.get("max_tokens", engine.profile.defaults.max_new_tokens)
    num_new = num_new if isinstance(num_new, int) else 0
    num_positions = sum(min(_most_tokens(prompt) + num_new, longest) for prompt in prompts)
    num_logprobs = num_positions * num_choices * (num_top + 1)
    most = max(state.config.max_logprobs, longest * (MAX_LOGPROBS + 1))
    if num_logprobs > most:
        raise RequestError(
            name,
            f"asks for up to {num_logprobs} log-probabilities over all prompts and choices; at most {most} go in a "
            "request (max_logprobs): send fewer prompts at once, or ask for fewer likely or new tokens",
        )
    return num_logprobs


def _most_tokens(prompt: str | Sequence[int]) -> int:
    """How many tokens a prompt may have; a character that is not ASCII may take one for each of its bytes."""
    return len(prompt) if not isinstance(prompt, str) or prompt.isascii() else 4 * len(prompt)


def shown_token(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as text: its name if it is a special one, its bytes if they are no whole characters."""
    octets = tokenizer.token_bytes(token_id)
    if not octets:
        return tokenizer.token_name(token_id) or ""
    try:
        return octets.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{octet:02x}" for octet in octets)


# ---------------------------------------------------------------------- chat


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[Entry], num_top: int) -> dict[str, Any]:
    """Of the answer's tokens; thinking has none."""
    shown = [
        {
            **_chat_token(tokenizer, entry),
            "top_logprobs": [_chat_token(tokenizer, likely) for likely in entry["top"][:num_top]],
        }
        for entry in entries
        if entry["kind"] == "text"
    ]
    return {"content": shown, "refusal": None}


def _chat_token(tokenizer: Tokenizer, entry: Entry) -> dict[str, Any]:
    token = shown_token(tokenizer, entry["id"])
    return {"token": token, "bytes": entry["bytes"] or None, "logprob": entry["logprob"]}


# ---------------------------------------------------------------------- completions


@dataclass
class Columns:
    """`tokens`, `token_logprobs`, `top_logprobs` and `text_offset`, one place per token; each id is decoded once."""

    tokenizer: Tokenizer
    names: dict[int, str] = field(default_factory=dict)
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(self, token_id: int, entry: Entry | None, offset: int) -> None:
        """A token without entry, such as a prompt's first, has no log-probability."""
        self.tokens.append(self._name(token_id))
        self.token_logprobs.append(None if entry is None else entry["logprob"])
        self.top_logprobs.append(None if entry is None else self._top(entry["top"]))
        self.text_offset.append(offset)

    def add_generated(self, entries: Iterable[Entry], base: int) -> None:
        for entry in entries:
            self.add(entry["id"], entry, base + entry["offset"])

    def body(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }

    def _top(self, likely: Sequence[Entry]) -> dict[str, float]:
        """Best first. Two ids may look alike; then the likelier one keeps the place."""
        top: dict[str, float] = {}
        for entry in likely:
            top.setdefault(self._name(entry["id"]), entry["logprob"])
        return top

    def _name(self, token_id: int) -> str:
        name = self.names.get(token_id)
        if name is None:
            name = self.names[token_id] = shown_token(self.tokenizer, token_id)
        return name


def add_prompt(columns: Columns, ids: Sequence[int], entries: Iterable[Entry | None]) -> None:
    """For a thread of its own: a long prompt takes a while, and rests between its tokens."""
    text, pace = TextStream(columns.tokenizer), Pace()
    for token_id, entry in zip(ids, entries, strict=True):
        columns.add(token_id, entry, text.num_characters)
        text.push(token_id)
        pace.rest()
