"""The program `kestrel`: its verbs, each imported when it is called, and how a command line begins and ends.

Most verbs need torch, which takes seconds to import.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from kestrel.cli.config_flags import add_verb
from kestrel.cli.console import FAILED, INTERRUPTED, OK, USAGE_ERROR, Interrupted, note, report, write
from kestrel.cli.verb_help import VerbGroup

VERBS = {
    "query": "Answer a question, about a picture or without one.",
    "caption": "Describe a picture.",
    "point": "Point at every instance of an object.",
    "detect": "Find the box of every instance of an object.",
    "segment": "Outline an object.",
    "chat": "Talk with a model in the terminal.",
    "complete": "Continue a text, as it is: no template is added.",
    "label": "Label folders of pictures and videos.",
    "schedule": "Ask many questions at the same time and show how long each took.",
    "serve": "Serve a model over HTTP.",
    "mcp": "Offer a model to assistants as tools of the Model Context Protocol.",
    "batch": "Answer a file of requests, or of prompts, into a file.",
    "eval": "Evaluate a model on new drawn scenes with exact annotations.",
    "profile": "Show where a request's time goes: JPEG decoding, upload, resizing, vision, prefill, tokens, "
    "gaps of the host.",
    "tune": "Find the fastest block sizes of the Triton kernels on this GPU, for every later run of Kestrel on it.",
    "simulate": "Say how many GPUs traffic needs, and how long answers take on them, without a GPU.",
    "models": "List the models that --model knows.",
    "demo": "Try every skill on a bundled scene with the embedded model.",
}
"""What the list of verbs says of each: the first line of its own help."""
GROUPS = {
    "adapters": "List, inspect and convert adapters.",
    "bench": "Measure speed.",
    "cluster": "Serve a model from several GPUs.",
    "train": "Train models.",
}
"""Verbs with verbs of their own."""
SUBVERBS = {"eval": ("adapter",)}
"""Of verbs that do something without one too; functions of the same module."""
OTHER_WORDS = {
    "query": ("ask", "question", "answer", "count", "read", "vqa"),
    "caption": ("describe", "description"),
    "detect": ("find", "locate", "box", "boxes", "search"),
    "segment": ("outline", "mask", "cut"),
    "complete": ("continue", "generate"),
    "label": ("annotate", "tag"),
    "serve": ("server", "start", "api"),
    "train adapter": ("finetune", "fine-tune", "lora"),
    "eval": ("evaluate", "test"),
    "bench": ("benchmark", "measure"),
    "models": ("list", "ls"),
}
"""What people may call a verb; nothing in the spelling leads from one to the other."""
SKILL_VERBS = ("query", "caption", "point", "detect", "segment", "complete")


def run(arguments: Sequence[str]) -> int:
    """Run one command line; return the exit code."""
    try:
        code = _program().main(list(arguments), prog_name="kestrel", standalone_mode=False, obj=tuple(arguments))
        if code == INTERRUPTED:  # what Typer makes of a KeyboardInterrupt
            raise Interrupted
        sys.stdout.flush()
        return code or OK
    except BrokenPipeError:
        _drop_stdout()
        return FAILED
    except (Interrupted, KeyboardInterrupt, typer.Abort):
        note("interrupted")
        return INTERRUPTED
    except Exception as error:
        return report(error)


@cache
def _program() -> TyperGroup:
    app = typer.Typer(
        cls=_Program,
        help="Kestrel runs vision-language and text models: answers, captions, points, boxes, outlines, conversations.",
        epilog="Start with `kestrel demo`, then `kestrel models`.",
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_kestrel)
    program = typer.main.get_command(app)
    assert isinstance(program, TyperGroup)
    for name, text in (VERBS | GROUPS).items():
        program.add_command(_LateVerb(name, help=text))
    return program


class _Program(VerbGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except USAGE_ERROR as error:
            meant = next((verb for verb, words in OTHER_WORDS.items() if args[0].lower() in words), None)
            if meant is not None:
                cast(typer.BadParameter, error).message = f"No such command {args[0]!r}. Did you mean {meant!r}?"
            raise


class _LateVerb(TyperCommand):
    """Stands for the verb of its name until that is called or asked for help."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        assert self.name is not None
        if args and args[0] in SUBVERBS.get(self.name, ()):
            return verb_command(self.name, args[0]).make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)
        return verb_command(self.name).make_context(info_name, args, parent, **extra)


@cache
def verb_command(name: str, subverb: str | None = None) -> Any:
    module = verb_module(name)
    if name in GROUPS:
        return typer.main.get_command(module.make_group())
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    verb = getattr(module, subverb or name)
    add_verb(app, name, verb)
    return typer.main.get_command(app)


def verb_module(name: str) -> ModuleType:
    """Holds a function of the verb's name; of a group, `make_group`."""
    return import_module(f"kestrel.cli.{'skill_verbs' if name in SKILL_VERBS else name}")


def _kestrel(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, show_default=False)
    ] = False,
) -> None:
    if show_version:
        write(f"kestrel {_version()}\n")
        raise typer.Exit
    if context.invoked_subcommand is None:
        write(context.get_help() + "\n")
        raise typer.Exit


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - it takes 40 ms

    try:
        return version("kestrel")
    except PackageNotFoundError:
        return "(not installed: run from its source folder)"


def _drop_stdout() -> None:
    """Whoever read stdout has gone; keep the interpreter from complaining about it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
