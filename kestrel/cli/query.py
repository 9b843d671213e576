"""kestrel query: a question, about a picture or without one."""

from __future__ import annotations

from typing import Annotated

import typer

from kestrel.cli.config_flags import with_flags
from kestrel.cli.one_skill import SkillCall, run_skill
from kestrel.cli.options import ReasoningOption, SpatialRefOption, TextOutputOptions, TextSettings, parse_spatial_refs
from kestrel.cli.pictures import refuse_path_as_question
from kestrel.config import RuntimeConfig
from kestrel.errors import RequestError


@with_flags
def query(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[IMAGE] QUESTION",
            help="A picture (a file, or - for stdin) and a question about it; or a question alone.",
            show_default=False,
        ),
    ],
    image: Annotated[
        str | None, typer.Option("--image", metavar="FILE", help="Another way to give the picture.")
    ] = None,
    reasoning: ReasoningOption = None,
    spatial_ref: SpatialRefOption = None,
    *,
    settings: TextSettings,
    output: TextOutputOptions,
    config: RuntimeConfig,
) -> None:
    """Answer a question, about a picture or without one.

    kestrel query examples/images/01.png "What is this?" --model moondream2

    kestrel query "Why is the sky blue?" --model moondream2

    The answer goes to stdout; thinking, if any, to stderr.
    """
    source, question = picture_and_question(words, image)
    fields = {"question": question, "reasoning": reasoning, "spatial_refs": parse_spatial_refs(spatial_ref)}
    run_skill(SkillCall("query", fields, source, settings, output, config))


def picture_and_question(words: list[str], image: str | None) -> tuple[str | None, str]:
    """The last word is the question; one before it is the picture."""
    if len(words) > 2:
        raise RequestError("question", f"{len(words)} arguments were given; quote a question of several words")
    if len(words) == 2 and image is not None:
        raise RequestError("--image", f"the picture is given twice ({words[0]} and {image}); give it once")
    question = words[-1]
    if len(words) == 1 and image is None:
        refuse_path_as_question("question", question, "add the question after it")
    return (words[0] if len(words) == 2 else image), question
