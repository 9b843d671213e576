"""The verbs of the program, each imported when it is called: most of them need torch, which takes seconds to import."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand

from kestrel.cli.config_flags import environment_hint

VERBS = {
    "query": "Answer a question, about a picture or without one.",
    "caption": "Describe a picture.",
    "point": "Point at every instance of an object.",
    "detect": "Find the box of every instance of an object.",
    "segment": "Outline an object.",
    "schedule": "Ask many questions at once and show what each took.",
    "serve": "Serve a model over HTTP.",
    "eval": "Judge a model on held-out scenes, drawn on the spot, whose truth is exact.",
    "profile": "Show where a request's time goes: JPEG decoding, upload, resizing, vision, prefill, tokens, "
    "gaps of the host.",
    "tune": "Find the fastest block sizes of the Triton kernels on this GPU, for every later run of Kestrel on it.",
    "models": "List the models that --model knows.",
    "demo": "Try every skill on a bundled scene with the embedded model.",
}
"""What the list of verbs says of each: the first line of its own help."""
GROUPS = {
    "adapters": "List, inspect and convert adapters.",
    "bench": "Measure speed.",
    "train": "Train models.",
}
"""Verbs with verbs of their own."""


class LateVerb(TyperCommand):
    """Stands for the verb of its name until that is called or asked for help."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        assert self.name is not None
        return verb_command(self.name).make_context(info_name, args, parent, **extra)


def late_verbs() -> list[LateVerb]:
    return [LateVerb(name, help=text) for name, text in (VERBS | GROUPS).items()]


@cache
def verb_command(name: str) -> Any:
    """A verb is the function of that name in the module of that name; there a group is made by `make_group`."""
    module = import_module(f"kestrel.cli.{name}")
    if name in GROUPS:
        return typer.main.get_command(module.make_group())
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    verb = getattr(module, name)
    app.command(name, epilog=environment_hint(verb))(verb)
    return typer.main.get_command(app)
