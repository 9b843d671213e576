"""A request's path as the routes know it."""

from __future__ import annotations

from starlette.types import Scope


def route_path(scope: Scope) -> str:
    """The path without `root_path`, which a proxy may have taken off or left on."""
    return scope["path"].removeprefix(scope.get("root_path", "")) or "/"
