"""One header of a request, looked up where it is: the framework's mapping decodes and compares them all each time."""

from __future__ import annotations

from starlette.types import Scope


def header_of(scope: Scope, name: bytes) -> str | None:
    """The first of that name, which is given in small letters."""
    for given, value in scope["headers"]:
        if given == name:
            return value.decode("latin-1")
    return None
