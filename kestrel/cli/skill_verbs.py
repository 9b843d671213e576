"""The verbs that ask one skill: query, caption, point, detect, segment and complete."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kestrel.cli.config_flags import with_flags
from kestrel.cli.console import note, run_to_end
from kestrel.cli.loading import check_model, note_default_model, open_engine, require_skill
from kestrel.cli.options import (
    STDIN,
    ImageArgument,
    ObjectArgument,
    ObjectSettings,
    OutputOptions,
    ReasoningOption,
    SaveOptions,
    Settings,
    SpatialRefOption,
    TextOutputOptions,
    TextSettings,
    check_adapter,
    check_choice,
    check_pictures,
    check_settings,
    object_or_objects,
    parse_spatial_refs,
    read_picture,
    refuse_path_as_question,
)
from kestrel.config import RuntimeConfig
from kestrel.errors import RequestError
from kestrel.settings import CAPTION_LENGTHS, INSTANCES
from kestrel.settings import text as check_text

if TYPE_CHECKING:
    from kestrel.engine import EngineResult, EngineStream
    from kestrel.images.picture import RgbImage


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
    _run_skill(_SkillCall("query", fields, source, settings, output, config))


def picture_and_question(words: list[str], image: str | None) -> tuple[str | None, str]:
    """The last word is the question; one before it is the picture."""
    if len(words) > 2:
        raise RequestError("question", f"{len(words)} arguments were given; quote a question of several words")
    if len(words) == 2 and image is not None:
        raise RequestError("--image", f"the picture is given twice ({words[0]} and {image}); give it once")
    question = words[-1]
    if len(words) == 1 and image is None:
        refuse_path_as_question("question", question, "add the question after it")
    return (words[0] if len(words) == 2 else image), check_text("question", question)


@with_flags
def caption(
    image: ImageArgument,
    length: Annotated[str, typer.Option("--length", help="short, normal or long.")] = "normal",
    *,
    settings: TextSettings,
    output: TextOutputOptions,
    config: RuntimeConfig,
) -> None:
    """Describe a picture."""
    check_choice("--length", length, CAPTION_LENGTHS)
    _run_skill(_SkillCall("caption", {"length": length}, image, settings, output, config))


@with_flags
def point(
    image: ImageArgument,
    object: ObjectArgument,
    spatial_ref: SpatialRefOption = None,
    *,
    settings: ObjectSettings,
    output: SaveOptions,
    config: RuntimeConfig,
) -> None:
    """Point at every instance of an object.

    Prints x and y of each instance: fractions of the picture's width and height, from 0 to 1.
    """
    fields = {"object": object_or_objects(object), "spatial_refs": parse_spatial_refs(spatial_ref)}
    _run_skill(_SkillCall("point", fields, image, settings, output, config))


@with_flags
def detect(
    image: ImageArgument,
    object: ObjectArgument,
    *,
    settings: ObjectSettings,
    output: SaveOptions,
    config: RuntimeConfig,
) -> None:
    """Find the box of every instance of an object.

    Prints the sides of each box as fractions of the picture's width and height; a box may extend beyond the picture.
    """
    _run_skill(_SkillCall("detect", {"object": object_or_objects(object)}, image, settings, output, config))


@with_flags
def segment(
    image: ImageArgument,
    object: ObjectArgument,
    spatial_ref: SpatialRefOption = None,
    instances: Annotated[
        str | None,
        typer.Option(
            "--instances", help="one, or all: find every instance first, then outline each.", show_default=False
        ),
    ] = None,
    *,
    settings: TextSettings,
    output: SaveOptions,
    config: RuntimeConfig,
) -> None:
    """Outline an object.

    Prints its box, as fractions of the picture's width and height, and an SVG path relative to that box.
    """
    fields = {"object": object_or_objects(object), "spatial_refs": parse_spatial_refs(spatial_ref)}
    if instances is not None:
        check_choice("--instances", instances, INSTANCES)
    fields["instances"] = instances
    _run_skill(_SkillCall("segment", fields, image, settings, output, config))


@with_flags
def complete(
    prompt: Annotated[str, typer.Argument(metavar="TEXT", help="What to continue; - reads it from stdin.")],
    *,
    settings: TextSettings,
    output: TextOutputOptions,
    config: RuntimeConfig,
) -> None:
    """Continue a text, as it is: no template is added.

    kestrel complete "Once upon a time" --model-path /models/SmolLM2-135M

    Prints what follows the text, not the text itself.
    """
    if prompt == STDIN:
        prompt = sys.stdin.read()
    if not prompt:
        raise RequestError("TEXT", "is empty; give some words to continue")
    _run_skill(_SkillCall("complete", {"prompt": prompt}, None, settings, output, config))


# ---------------------------------------------------------------------- one request


@dataclass(frozen=True)
class _SkillCall:
    """What a verb was asked for."""

    skill: str
    fields: Mapping[str, Any]
    """The skill's own fields; None counts as not given."""
    source: str | None
    """Where the picture is."""
    settings: Settings
    output: OutputOptions
    config: RuntimeConfig

    @property
    def asks_for_several(self) -> bool:
        return isinstance(self.fields.get("object"), list) or self.fields.get("instances") == "all"


def _run_skill(call: _SkillCall) -> None:
    check_settings(call.skill, call.settings, call.output)
    if call.source is not None:
        check_pictures([call.source])
    check_adapter(call.settings.given().get("adapter"), call.config)
    check_model(call.config)
    run_to_end(_answer(call))


async def _answer(call: _SkillCall) -> None:
    picture = None if call.source is None else await read_picture(call.source, call.config)
    # Here and not above: help and refusals need none of this.
    from kestrel.cli.printing import note_limit, note_metrics, note_missing, printer_for  # noqa: PLC0415

    async with open_engine(call.config) as engine:
        require_skill(engine.profile, call.skill)
        printer = printer_for(
            call.skill,
            engine.model_name,
            file=call.source,
            as_json=call.output.as_json,
            streamed=call.output.stream,
            several=call.asks_for_several,
        )
        fields = {"image": picture, "settings": call.settings.given(), "read_along": call.output.stream, **call.fields}
        stream: EngineStream = await engine.run(call.skill, stream=True, **fields)
        note_default_model(call.config)
        async for chunk in stream:
            if call.output.stream:
                printer.chunk(chunk)
        result = await stream.result()
        printer.result(result)
    note_missing(call.fields.get("object"), result)
    _save(call, picture, result)
    note_limit(result, f"--{call.settings.bound.replace('_', '-')}")
    note_metrics(result.metrics)


def _save(call: _SkillCall, picture: RgbImage | None, result: EngineResult) -> None:
    if not isinstance(call.output, SaveOptions) or call.output.save is None or picture is None:
        return
    from kestrel.cli.drawing import draw_result, save_picture  # noqa: PLC0415

    label = None if call.asks_for_several else call.fields["object"]
    save_picture(draw_result(picture, result.output, label), call.output.save)
    note(f"drew the result into {call.output.save}")
