"""Items of the Responses API as messages of the chat skill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kestrel.errors import RequestError, shown
from kestrel.server.openai.chat import MAX_MESSAGES, ROLES, PartReader
from kestrel.server.openai.parameters import Body, given, require_known, require_list, type_of
from kestrel.settings import any_text
from kestrel.skills.base import ChatFormat

ITEMS: Mapping[str, tuple[str, ...]] = {
    "message": ("role", "content", "phase"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": ("summary", "content", "encrypted_content"),
}
"""Types of items and their fields. Each may have an id and a status too, which say nothing to a model."""
MESSAGE_ROLES = ("user", "assistant", "system", "developer")
PARTS: Mapping[str, tuple[str, ...]] = {
    "input_text": ("text",),
    "output_text": ("text", "annotations", "logprobs"),
    "input_image": ("image_url", "detail"),
}
_TEXTS = ("input_text", "output_text")
_CALL_FIELDS = {"id": "call_id", "function.name": "name", "function.arguments": "arguments"}


@dataclass
class Conversation:
    """Messages for the chat skill. A thought, an answer and calls of one turn are a single message there."""

    parts: PartReader
    chat: ChatFormat | None
    messages: list[dict[str, Any]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    """What the client called the parts of each."""

    def add(self, place: str, role: str, content: Any, **more: Any) -> None:
        own = f"messages[{len(self.messages)}]"
        self.names |= {f"{own}.{name}": f"{place}.{name}" for name in ("role", "content")}
        self.names[own] = place
        self.messages.append({"role": role, "content": content, **more})

    async def read(self, name: str, items: Sequence[Any]) -> None:
        if len(self.messages) + len(items) > MAX_MESSAGES:
            raise RequestError(name, f"brings the conversation to more than {MAX_MESSAGES} items; give fewer")
        for index, raw in enumerate(items):
            await self._read_item(f"{name}[{index}]", raw)

    async def _read_item(self, place: str, raw: Any) -> None:
        """A message may leave out its type."""
        item = given(raw) if isinstance(raw, Mapping) else raw
        typed = {"type": "message", **item} if isinstance(item, dict) and "role" in item else item
        kind = type_of(place, typed, ITEMS)
        require_known(f"{place}.", typed, ("type", "id", "status", *ITEMS[kind]))
        if kind == "message":
            await self._add_message(place, typed)
        elif kind == "reasoning":
            self._add_thought(place, typed)
        elif kind == "function_call":
            await self._add_call(place, typed)
        else:
            await self._add_result(place, typed)

    async def _add_message(self, place: str, item: Body) -> None:
        role = item["role"]
        if role not in MESSAGE_ROLES:
            raise RequestError(f"{place}.role", f"must be one of: {', '.join(MESSAGE_ROLES)} (got {shown(role)})")
        content = await self._content(f"{place}.content", item.get("content"), PARTS)
        known = () if self.chat is None else self.chat.roles
        role = role if role in known else ROLES.get(role, role)
        last = self.messages[-1] if self.messages else {}
        if role == last.get("role") == "assistant" and last["content"] is None and "tool_calls" not in last:
            last["content"] = content
        else:
            self.add(place, role, content)

    async def _content(self, name: str, value: Any, kinds: Mapping[str, tuple[str, ...]]) -> Any:
        if isinstance(value, str):
            return any_text(name, value)
        if value is None:
            raise RequestError(name, "is missing or null; give a text or a list of parts")
        if not isinstance(value, list) or not value:
            raise RequestError(name, f"must be a text or a list of parts (got {shown(value)})")
        self.parts.count(name, len(value))
        return [await self._part(f"{name}[{index}]", raw, kinds) for index, raw in enumerate(value)]

    async def _part(self, place: str, raw: Any, kinds: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
        kind = type_of(place, raw, kinds)
        part = given(raw)
        if "file_id" in part:
            raise RequestError(f"{place}.file_id", "is not supported: no files are kept; send an image_url")
        require_known(f"{place}.", part, ("type", *kinds[kind]))
        if kind == "input_image":
            return await self.parts.read_image(place, f"{place}.image_url", part.get("image_url"))
        return {"type": "text", "text": any_text(f"{place}.text", part.get("text"))}

    def _add_thought(self, place: str, item: Body) -> None:
        """Left out where the model's format has no place for it. A summary is no thought."""
        if "encrypted_content" in item:
            remedy = "nothing is encrypted here; leave it out"
            raise RequestError(f"{place}.encrypted_content", f"cannot be read: {remedy}")
        name, content = f"{place}.content", item.get("content", [])
        require_list(name, content)
        self.parts.count(name, len(content))
        texts = []
        for index, part in enumerate(content):
            type_of(f"{name}[{index}]", part, {"reasoning_text": None})
            texts.append(any_text(f"{name}[{index}].text", part.get("text")))
        if texts and self.chat is not None and "reasoning_content" in self.chat.message_fields:
            self.add(place, "assistant", None, reasoning_content="\n".join(texts))

    async def _add_call(self, place: str, item: Body) -> None:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.add(place, "assistant", None)
        calls: list[Any] = self.messages[-1].setdefault("tool_calls", [])
        own = f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"
        self.names |= {f"{own}.{theirs}": f"{place}.{name}" for theirs, name in _CALL_FIELDS.items()}
        self.parts.count(place, 1)
        call_id = any_text(f"{place}.call_id", item.get("call_id"))
        arguments = any_text(f"{place}.arguments", item.get("arguments"))
        function = {"name": item.get("name"), "arguments": arguments}
        calls.append(await self.parts.read_call(own, {"id": call_id, "type": "function", "function": function}))

    async def _add_result(self, place: str, item: Body) -> None:
        kinds = {kind: PARTS[kind] for kind in _TEXTS}
        content = await self._content(f"{place}.output", item.get("output"), kinds)
        self.add(place, "tool", content, tool_call_id=any_text(f"{place}.call_id", item.get("call_id")))
        self.names[f"messages[{len(self.messages) - 1}].content"] = f"{place}.output"
