"""Chat messages and content parts (text, pictures) as the skills take them, with the pictures as bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kestrel.errors import RequestError, shown
from kestrel.server.calls import AcceptedRequest
from kestrel.server.openai.parameters import NOT_TRAINED
from kestrel.server.request_images import image_bytes

ROLES = {"developer": "system"}
"""Other names of the chat skill's roles."""
TOOL_ROLES = ("tool", "function")
MAX_MESSAGES = 1000
MAX_PARTS = 4096
"""Parts in one request, where the context has room for so many."""
MAX_IMAGES = 8
"""Pictures in one request."""
_SHAPES = '{"type": "text", "text": …} or {"type": "image_url", "image_url": {"url": …}}'


async def skill_messages(value: Any, parts: PartReader) -> list[dict[str, Any]]:
    """Roles and contents; further fields of a message, such as `name`, are ignored."""
    if not isinstance(value, list) or not value:
        raise RequestError("messages", f"must be a list of 1 to {MAX_MESSAGES} messages (got {shown(value)})")
    if len(value) > MAX_MESSAGES:
        raise RequestError("messages", f"has {len(value)} entries; give at most {MAX_MESSAGES}")
    return [await _message(f"messages[{index}]", raw, parts) for index, raw in enumerate(value)]


async def _message(name: str, raw: Any, parts: PartReader) -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        raise RequestError(name, f'must be {{"role": …, "content": …}} (got {shown(raw)})')
    role, content = raw.get("role"), raw.get("content")
    if role in TOOL_ROLES:
        raise RequestError(f"{name}.role", f"is {role!r}: {NOT_TRAINED}")
    for field in ("tool_calls", "function_call", "audio"):
        if raw.get(field):
            raise RequestError(f"{name}.{field}", f"is not supported: {NOT_TRAINED}")
    if isinstance(content, list):
        content = await parts.read_all(f"{name}.content", content)
    return {"role": ROLES.get(role, role) if isinstance(role, str) else role, "content": content}


class PartReader:
    """Reads the parts of one request, and counts them and its pictures."""

    def __init__(self, accepted: AcceptedRequest) -> None:
        self._fetch = accepted.fetch
        self._threads = accepted.state.body_threads
        self._max_bytes = accepted.engine.config.max_image_bytes
        self._max_parts = min(MAX_PARTS, accepted.engine.max_model_length)
        self._num_parts = 0
        self.image_places: list[str] = []

    async def read_all(self, name: str, parts: Sequence[Any]) -> list[dict[str, Any]]:
        self._num_parts += len(parts)
        if self._num_parts > self._max_parts:
            raise RequestError(name, f"brings the request to {self._num_parts} parts; give at most {self._max_parts}")
        return [await self._read(f"{name}[{index}]", part) for index, part in enumerate(parts)]

    async def _read(self, name: str, part: Any) -> dict[str, Any]:
        """A part as the chat skill takes it: {"type": "text", "text"} or {"type": "image", "image": bytes}."""
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            return {"type": "text", "text": part["text"]}
        if kind != "image_url":
            raise RequestError(name, f"must be {_SHAPES} (got {shown(part)})")
        return {"type": "image", "image": await self._image(f"{name}.image_url", part.get("image_url"))}

    async def _image(self, name: str, value: Any) -> bytes:
        """`value` is a URL or an object with one; its `detail` means nothing here."""
        if len(self.image_places) >= MAX_IMAGES:
            raise RequestError(name, f"is one picture too many; send at most {MAX_IMAGES} in a request")
        self.image_places.append(name)
        if isinstance(value, Mapping):
            name, value = f"{name}.url", value.get("url")
        try:
            return await image_bytes(value, self._max_bytes, self._fetch, self._threads, name)
        except RequestError as error:
            if error.field == name:
                raise
            raise RequestError(name, str(error).removeprefix(f"{error.field}: ")) from error
