"""The lines of a batch: requests in OpenAI's form, or plain prompts.

The input is read once as a whole, for its digest and for custom_ids that stand twice; then line by line where each is
asked. Only the places of lines are kept in memory.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from kestrel.errors import ConfigError, RequestError, shown
from kestrel.server.json_body import parse_json

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
REQUEST_KEYS = ("custom_id", "method", "url", "body")
NO_PROMPT_FIELDS = ("messages", "stream", "image", "image_url")
"""What a plain prompt cannot have beside it: it would be dropped, or change what the line is."""
MOST_NAMED = 5
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_PATH = re.compile(r"/(?!/)[!-~]{1,1000}")


class BadLine(Exception):
    """A line that is not asked. The message does not name the line."""

    def __init__(self, message: str, code: str = "invalid_line", custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


@dataclass(frozen=True, slots=True)
class BatchRequest:
    custom_id: str
    url: str
    """A path, such as /v1/query."""
    body: Mapping[str, Any]
    is_prompt: bool = False

    def content(self) -> bytes:
        """The body as JSON. Raises BadLine."""
        try:
            return orjson.dumps(self.body)
        except orjson.JSONEncodeError:
            raise BadLine("body: nests too deeply; flatten it", custom_id=self.custom_id) from None


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """How plain prompts are asked."""

    url: str = CHAT
    body: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the request; those beside a prompt win."""

    def __post_init__(self) -> None:
        if self.url not in (CHAT, COMPLETION):
            raise ConfigError("--prompt-url", f"{shown(self.url)} takes no prompts; use {CHAT} or {COMPLETION}")
        for name in ("prompt", *NO_PROMPT_FIELDS):
            if name in self.body:
                raise ConfigError("--prompt-body", f"{name} is not a setting of plain prompts; leave it out")

    def request(self, custom_id: str, prompt: str, fields: Mapping[str, Any]) -> BatchRequest:
        asked = {"prompt": prompt} if self.url == COMPLETION else {"messages": [{"role": "user", "content": prompt}]}
        return BatchRequest(custom_id, self.url, {**self.body, **fields, **asked}, is_prompt=True)


class BatchInput:
    """Open with `BatchInput.open`. A `.txt` file has a prompt on each line as it stands, any other file JSON."""

    def __init__(self, file: BinaryIO, is_text: bool, prompts: PromptOptions) -> None:
        self._file = file
        self.is_text = is_text
        self.prompts = prompts
        self.numbers = array("Q")
        """Of the lines that are not blank, counted from 1 with those that are."""
        self._starts = array("Q")
        self._sizes = array("Q")
        self.digest = ""
        """Of the whole file (SHA-256, hex)."""
        self.num_prompts = 0

    @classmethod
    def open(cls, path: Path, prompts: PromptOptions | None = None) -> BatchInput:
        """Raises ConfigError for a file that cannot be read, holds nothing, or gives a custom_id twice."""
        if not path.is_file():
            what = "is not a regular file" if path.exists() else "does not exist"
            raise ConfigError("IN.jsonl", f"{path} {what}; give a file with a request or prompt on each line")
        try:
            lines = cls(path.open("rb"), path.suffix.lower() == ".txt", prompts or PromptOptions())
        except OSError as error:
            raise ConfigError("IN.jsonl", f"cannot read {path} ({error.strerror}); give a readable file") from error
        try:
            lines._scan()
            if not len(lines):
                raise ConfigError("IN.jsonl", f"{path} has no lines; write a request or prompt on each")
        except BaseException:
            lines.close()
            raise
        return lines

    def __len__(self) -> int:
        return len(self.numbers)

    def _scan(self) -> None:
        digest, start = hashlib.sha256(), 0
        first: dict[str, int] = {}
        repeated: list[str] = []
        for number, line in enumerate(self._file, start=1):
            digest.update(line)
            if line.removeprefix(_BYTE_ORDER_MARK).strip():
                self.numbers.append(number)
                self._starts.append(start)
                self._sizes.append(len(line))
                custom_id = self._custom_id(line, number)
                if custom_id is not None and first.setdefault(custom_id, number) != number:
                    repeated.append(f"{shown(custom_id)} on lines {first[custom_id]} and {number}")
            start += len(line)
        self.digest = digest.hexdigest()
        if repeated:
            more = f", and {len(repeated) - MOST_NAMED} more" if len(repeated) > MOST_NAMED else ""
            named = "; ".join(repeated[:MOST_NAMED])
            raise ConfigError("custom_id", f"{named}{more}; give every line its own, so that answers can be told apart")

    def _custom_id(self, line: bytes, number: int) -> str | None:
        try:
            request = self._parsed(line, number)
        except BadLine as bad:
            return bad.custom_id
        self.num_prompts += request.is_prompt
        return request.custom_id

    def request(self, index: int) -> BatchRequest:
        """Raises BadLine."""
        self._file.seek(self._starts[index])
        return self._parsed(self._file.read(self._sizes[index]), self.numbers[index])

    def _parsed(self, line: bytes, number: int) -> BatchRequest:
        line = (line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line).strip()
        value = _text(line) if self.is_text else _json(line)
        if isinstance(value, str):
            value = {"prompt": value}
        if not isinstance(value, dict):
            raise BadLine("must be a JSON object or a text")
        custom_id = value.get("custom_id")
        if custom_id is not None and (not isinstance(custom_id, str) or not custom_id):
            raise BadLine(f"custom_id: must be a text that is not empty (got {shown(custom_id)})")
        try:
            if "prompt" in value and value.keys().isdisjoint(REQUEST_KEYS[1:]):
                return _prompt(value, custom_id or f"line-{number}", self.prompts)
            return _request(value)
        except BadLine as bad:
            bad.custom_id = custom_id
            raise

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> BatchInput:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _text(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise BadLine(f"is not UTF-8 at byte {error.start}; save the file as UTF-8") from None


def _json(line: bytes) -> object:
    try:
        return parse_json(line)
    except RequestError as error:
        raise BadLine(str(error).removeprefix("body: ")) from None


def _prompt(line: dict[str, Any], custom_id: str, options: PromptOptions) -> BatchRequest:
    fields = {name: value for name, value in line.items() if name not in ("custom_id", "prompt")}
    prompt = line["prompt"]
    if not isinstance(prompt, str) or not prompt.strip():
        raise BadLine(f"prompt: must be a text that is not empty (got {shown(prompt)})")
    for name in NO_PROMPT_FIELDS:
        if name in fields:
            raise BadLine(f"{name}: cannot be used together with a prompt; write the line with method, url and body")
    return options.request(custom_id, prompt, fields)


def _request(line: dict[str, Any]) -> BatchRequest:
    missing = [name for name in REQUEST_KEYS if line.get(name) is None]
    if missing:
        hint = "" if len(missing) < len(REQUEST_KEYS) else ", or a prompt"
        raise BadLine(f"{missing[0]}: is missing; a request has {', '.join(REQUEST_KEYS)}{hint}")
    for name in line:
        if name not in REQUEST_KEYS:
            raise BadLine(f"{name}: is not known; a request has {', '.join(REQUEST_KEYS)}")
    url, body = line["url"], line["body"]
    if line["method"] != "POST":
        raise BadLine(f"method: must be POST (got {shown(line['method'])})")
    if not isinstance(url, str) or _PATH.fullmatch(url) is None:
        raise BadLine(f"url: must be a path such as {CHAT} (got {shown(url)})")
    if not isinstance(body, dict):
        raise BadLine(f"body: must be an object (got {shown(body)})")
    if body.get("stream") not in (None, False):
        raise BadLine("body.stream: a batch has nobody to stream to; leave it out", "stream_not_supported")
    return BatchRequest(line["custom_id"], url, body)
