"""Chat messages of the dialect as the chat skill takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kestrel.errors import RequestError, shown
from kestrel.server.openai.parameters import NOT_TRAINED
from kestrel.server.openai.parts import PartReader

ROLES = {"developer": "system"}
"""Other names of the chat skill's roles."""
TOOL_ROLES = ("tool", "function")
MAX_MESSAGES = 1000


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
