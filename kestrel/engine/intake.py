"""What the engine checks of a request before a skill or the worker sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kestrel.errors import RequestError
from kestrel.skills.base import Prompt
from kestrel.tokens import TextToken

MAX_NAME_LENGTH = 256
MAX_PRIORITY = 1_000_000


@dataclass(frozen=True, slots=True)
class Route:
    """The engine's own fields of a request, which no skill sees."""

    request_id: str | None
    priority: int
    tenant: str | None


def take_route(fields: dict[str, Any]) -> Route:
    """Takes the engine's fields out of `fields`, checked."""
    request_id, tenant = fields.pop("request_id", None), fields.pop("tenant", None)
    priority = fields.pop("priority", None)
    for name, value in (("request_id", request_id), ("tenant", tenant)):
        if value is not None and (not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_LENGTH):
            raise RequestError(name, f"must be a string of 1 to {MAX_NAME_LENGTH} characters (got {value!r:.80})")
    priority = 0 if priority is None else priority
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
        raise RequestError("priority", f"must be an integer from -{MAX_PRIORITY} to {MAX_PRIORITY} (got {priority!r})")
    return Route(request_id, priority, tenant)


def require_known_ids(prompt: Prompt, vocab_size: int) -> None:
    """Refuse ids the model does not have; on the device they would be out of bounds for the whole batch."""
    ids = {"prompt": [item.id for item in prompt.items if isinstance(item, TextToken)]}
    ids |= {"allowed_ids": prompt.sampling.allowed_ids, "suppressed_ids": prompt.sampling.suppressed_ids}
    for name, given in ids.items():
        bad = next((i for i in given if not 0 <= i < vocab_size), None)
        if bad is not None:
            raise RequestError(name, f"token id {bad} does not exist; ids run from 0 to {vocab_size - 1}")
