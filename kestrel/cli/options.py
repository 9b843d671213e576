"""Options that several verbs share."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from kestrel.errors import RequestError
from kestrel.skills.fields import FieldTable
from kestrel.skills.layout import SpatialRef, spatial_refs

SAVED_FORMATS = (".png", ".jpg", ".jpeg", ".webp")

ImageArgument = Annotated[str, typer.Argument(metavar="IMAGE", help="A picture file, or - to read one from stdin.")]
ObjectArgument = Annotated[str, typer.Argument(metavar="OBJECT", help='What to look for, such as "red car".')]
ReasoningOption = Annotated[
    bool | None,
    typer.Option("--reasoning/--no-reasoning", help="Think before answering. Default: as the model prefers."),
]
SpatialRefOption = Annotated[
    list[str] | None,
    typer.Option(
        "--spatial-ref",
        metavar="X,Y|X0,Y0,X1,Y1",
        help="A point or box on the picture to talk about, from 0 to 1. Repeatable.",
    ),
]


def _doc(text: str, **extra: Any) -> dict[str, Any]:
    return {"help": text, **extra}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How tokens are chosen. What is not given is left to the model's own defaults."""

    temperature: float | None = field(
        default=None, metadata=_doc("0 takes the most likely token each time; at most 2.")
    )
    top_p: float | None = field(default=None, metadata=_doc("Keep the likely tokens that reach this probability."))
    top_k: int | None = field(default=None, metadata=_doc("Keep this many likely tokens; 0 keeps all."))
    min_p: float | None = field(
        default=None, metadata=_doc("Drop tokens less likely than this share of the most likely one.")
    )
    seed: int | None = field(default=None, metadata=_doc("Same seed, same request: same answer."))
    logprobs: int | None = field(
        default=None, metadata=_doc("Add log-probabilities of each token and its K most likely rivals.", metavar="K")
    )
    adapter: str | None = field(
        default=None,
        metadata=_doc("Adapter to answer with, such as the name of a file in --adapter-dir.", metavar="ID"),
    )

    def given(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class TextSettings(Settings):
    """Settings of a skill that is bounded by tokens."""

    max_new_tokens: int | None = field(
        default=None, metadata=_doc("Longest answer in tokens; thinking has a budget of the same size.")
    )


@dataclass(frozen=True, kw_only=True)
class ObjectSettings(Settings):
    """Settings of a skill that is bounded by objects."""

    max_objects: int | None = field(default=None, metadata=_doc("Most objects to find."))
    max_new_tokens: int | None = field(
        default=None, metadata=_doc("Refused, with a hint to the bound that counts.", hidden=True)
    )


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    as_json: bool = field(
        default=False,
        metadata=_doc(
            "Print JSON; one object per line where there are several.", flags=("--json",), show_default=False
        ),
    )
    stream: bool = field(
        default=False, metadata=_doc("Print pieces as they come.", flags=("--stream",), show_default=False)
    )


@dataclass(frozen=True, kw_only=True)
class SaveOptions(OutputOptions):
    """Output of a skill that finds places."""

    save: Path | None = field(
        default=None,
        metadata=_doc("Draw the result over the picture and write it here (PNG, JPEG or WebP).", metavar="FILE"),
    )


@dataclass(frozen=True, kw_only=True)
class TextOutputOptions(OutputOptions):
    """Output of a skill that only writes text; --save is known so that its refusal can say why."""

    save: Path | None = field(default=None, metadata=_doc("Not available for text.", hidden=True))


def check_settings(skill: str, settings: Settings, output: OutputOptions) -> None:
    """Refuse what can be refused before a model is loaded."""
    bound = "max_objects" if isinstance(settings, ObjectSettings) else "max_tokens"
    values = FieldTable(skill, {}, bound=bound).read({"settings": settings.given()})
    values.sampling(temperature=0.0, top_p=1.0, max_new_tokens=1)
    if settings.logprobs is not None and not output.as_json:
        raise RequestError("--logprobs", "is shown in JSON only; add --json")
    if isinstance(output, TextOutputOptions) and output.save is not None:
        raise RequestError(
            "--save", f"{skill} finds no points, boxes or outlines to draw; use point, detect or segment"
        )
    if isinstance(output, SaveOptions) and output.save is not None:
        check_saved_path(output.save)


def check_saved_path(path: Path) -> None:
    if path.suffix.lower() not in SAVED_FORMATS:
        raise RequestError("--save", f"{path} has no known ending; use one of: {', '.join(SAVED_FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise RequestError("--save", f"{path.parent} is not a folder; create it first")


def parse_spatial_refs(texts: list[str] | None) -> tuple[SpatialRef, ...] | None:
    """Points and boxes from "x,y" and "x0,y0,x1,y1"; None when there are none."""
    if not texts:
        return None
    return spatial_refs("--spatial-ref", [_numbers(text) for text in texts])


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise RequestError("--spatial-ref", f"{text!r} is not x,y or x0,y0,x1,y1 with numbers from 0 to 1") from None
