"""Results as the published models' own programs give them: places without what this engine tells beside them."""

from __future__ import annotations

from typing import Any

OWN = ("label", "score", "pixels", "image")


def bare(value: Any) -> Any:
    """The value without those fields, at any depth."""
    if isinstance(value, dict):
        return {name: bare(inner) for name, inner in value.items() if name not in OWN}
    return [bare(inner) for inner in value] if isinstance(value, list) else value
