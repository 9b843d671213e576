"""Which environment variable a value came from, for messages that refuse it."""

from __future__ import annotations

import os
from collections.abc import Iterable

import typer


def variable_of(context: typer.Context, parameter: str, variables: Iterable[str]) -> str | None:
    """The variable that gave a parameter of a command its value; None when something else did."""
    source = context.get_parameter_source(parameter)
    if source is None or source.name != "ENVIRONMENT":
        return None
    return next((variable for variable in variables if os.environ.get(variable)), None)
