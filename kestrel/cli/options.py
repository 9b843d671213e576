"""Arguments and options that several verbs share, and what is checked of them before a model is loaded."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

import typer

from kestrel.cli.console import note, run_to_end
from kestrel.config import RuntimeConfig
from kestrel.errors import ConfigError, RequestError, shown
from kestrel.settings import OTHER_BOUND, SETTINGS, Setting, object_names

if TYPE_CHECKING:
    from kestrel.images.picture import RgbImage
    from kestrel.skills.builtin import SpatialRef
    from kestrel.train.scenes.atlas import SpriteAtlas

MAX_NAMES_SHOWN = 20
SAVED_FORMATS = (".png", ".jpg", ".jpeg", ".webp")

ImageArgument = Annotated[str, typer.Argument(metavar="IMAGE", help="A picture file, or - to read one from stdin.")]
ObjectArgument = Annotated[
    str,
    typer.Argument(
        metavar="OBJECT",
        help='What to look for, such as "red car". Commas separate several: gear,bolt; \\, is a comma in a name.',
    ),
]
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
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.", show_default=False)]


def flag(text: str, default: Any = None, **extra: Any) -> Any:
    return field(default=default, metadata={"help": text, **extra})


class Settings:
    """How tokens are chosen. What is not given is left to the model's own defaults."""

    bound: ClassVar[str]

    def given(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


COMMON_SETTINGS = ("max_tokens", "max_objects", "temperature")
SettingsT = TypeVar("SettingsT", bound=Settings)


def _with_settings(group: type[SettingsT]) -> type[SettingsT]:
    """A dataclass with a field for each setting that has a flag. The bound that does not count is known, but hidden:
    its refusal says which one counts."""
    for setting in SETTINGS.values():
        if setting.has_flag:
            group.__annotations__[setting.name] = _TYPES[setting.kind.schema["type"]] | None
            names = tuple(f"--{name.replace('_', '-')}" for name in setting.names)
            is_hidden = setting.name == OTHER_BOUND[group.bound]
            is_common = setting.name in COMMON_SETTINGS
            extra = {"flags": names, "hidden": is_hidden, "group": "Answers", "common": is_common}
            setattr(group, setting.name, flag(_help(setting), **extra))
    return dataclass(frozen=True, kw_only=True)(group)


_TYPES = {"integer": int, "number": float, "string": str}


def _help(setting: Setting) -> str:
    schema = setting.kind.schema
    text = setting.meaning.replace("`", "")
    return f"{text} From {schema['minimum']:g} to {schema['maximum']:g}." if schema["type"] == "number" else text


@_with_settings
class TextSettings(Settings):
    """Settings of a skill that is bounded by tokens."""

    bound = "max_tokens"


@_with_settings
class ObjectSettings(Settings):
    """Settings of a skill that is bounded by objects."""

    bound = "max_objects"


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    as_json: bool = flag(
        "Print JSON; if there are several objects, one per line.", False, flags=("--json",), show_default=False
    )
    stream: bool = flag("Print the answer while it is generated.", False, flags=("--stream",), show_default=False)


@dataclass(frozen=True, kw_only=True)
class SaveOptions(OutputOptions):
    """Output of a skill that finds places."""

    save: Path | None = field(
        default=None,
        metadata={"help": "Draw the result over the picture and write it here (PNG, JPEG or WebP).", "metavar": "FILE"},
    )


@dataclass(frozen=True, kw_only=True)
class TextOutputOptions(OutputOptions):
    """Output of a skill that only writes text; --save is known so that its refusal can say why."""

    save: Path | None = field(default=None, metadata={"help": "Not available for text.", "hidden": True})


def check_settings(skill: str, settings: Settings, output: OutputOptions) -> None:
    """Refuse what can be refused before a model is loaded."""
    given = settings.given()
    if given:
        from kestrel.skills.fields import FieldTable  # noqa: PLC0415

        values = FieldTable(skill, {}, bound=settings.bound).read({"settings": given})
        values.sampling(temperature=0.0, top_p=1.0, max_new_tokens=1)
    if "logprobs" in given and not output.as_json:
        raise RequestError("--logprobs", "is shown in JSON only; add --json")
    if isinstance(output, TextOutputOptions) and output.save is not None:
        raise RequestError(
            "--save", f"{skill} finds no points, boxes or outlines to draw; use point, detect or segment"
        )
    if isinstance(output, SaveOptions) and output.save is not None:
        check_saved_path(output.save)


def check_adapter(adapter: str | None, config: RuntimeConfig, *, is_here: bool = True) -> None:
    """Before a model is loaded: it has a source, and is in it where that is only a folder on this machine."""
    if adapter is None:
        return
    from kestrel.adapters import AdapterId  # noqa: PLC0415
    from kestrel.adapters.sources import (  # noqa: PLC0415
        API_KEY_VARIABLE,
        FolderSource,
        given_key,
        has_adapter_source,
    )

    name, folder = str(AdapterId.parse(adapter)), config.adapter_folder
    if not has_adapter_source(config, given_key()):
        raise RequestError(
            "adapter",
            f"'{name}' has no source; add --adapter-dir or --adapter-url-template, or set {API_KEY_VARIABLE}",
        )
    if not is_here or folder is None or has_adapter_source(replace(config, adapter_dir=None), given_key()):
        return
    names = [listing.name for listing in run_to_end(FolderSource(folder).list())]
    if name not in names:
        known = f"it has {', '.join(names[:MAX_NAMES_SHOWN])}" if names else "it has no adapters"
        raise RequestError("adapter", f"'{name}' is not in {folder}; {known}")


def check_choice(flag: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise RequestError(flag, f"{shown(value)} is not known; use one of: {', '.join(choices)}")


def check_saved_path(path: Path) -> None:
    if path.suffix.lower() not in SAVED_FORMATS:
        raise RequestError("--save", f"{path} has no known ending; use one of: {', '.join(SAVED_FORMATS)}")
    check_parent_folder("--save", path)


def check_parent_folder(flag: str, path: Path) -> None:
    """Before minutes of work, not after them."""
    if not path.absolute().parent.is_dir():
        raise ConfigError(flag, f"{path.parent} is not a folder; create it first")


def open_sprites(path: Path) -> SpriteAtlas:
    """Says so when it leaves a file behind that nobody asked for."""
    from kestrel.evals.run import open_atlas  # noqa: PLC0415

    is_new = not path.exists()
    atlas = open_atlas(path)
    if is_new:
        note(f"drew the sprites of scenes into {path}, for later runs too; --atlas names another place")
    return atlas


def split_names(texts: Sequence[str]) -> list[str]:
    """Of a repeatable option with values separated by commas."""
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


def object_or_objects(text: str, field: str = "object") -> str | list[str]:
    """A name, or those between commas; a backslash before a comma makes it part of a name."""
    parts = [part.replace("\\,", ",").strip() for part in re.split(r"(?<!\\),", text)]
    if len(parts) > 1 and "" in parts:
        raise RequestError(field, f"{shown(text)} has a comma without a name beside it; leave it out")
    try:
        names = object_names(parts if len(parts) > 1 else parts[0])
    except RequestError as error:
        raise RequestError(field, str(error).removeprefix(f"{error.field}: ")) from None
    return names[0] if len(parts) == 1 else list(names)


def parse_size(flag: str, text: str) -> tuple[int, int]:
    """Height and width from "378x378"."""
    match = re.fullmatch(r"([0-9]{1,6})x([0-9]{1,6})", text.strip().lower())
    if match is None:
        raise ConfigError(flag, f"{text!r} is not a height and a width; write it as in 378x378")
    return int(match[1]), int(match[2])


def parse_spatial_refs(texts: list[str] | None) -> tuple[SpatialRef, ...] | None:
    """Points and boxes from "x,y" and "x0,y0,x1,y1"; None when there are none."""
    if not texts:
        return None
    from kestrel.skills.builtin import spatial_refs  # noqa: PLC0415

    return spatial_refs("--spatial-ref", [_numbers(text) for text in texts])


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise RequestError("--spatial-ref", f"{text!r} is not x,y or x0,y0,x1,y1 with numbers from 0 to 1") from None


# ---------------------------------------------------------------------- pictures


STDIN = "-"
PICTURE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".heic", ".avif")


def is_file(text: str) -> bool:
    """Whether a word of the command line names a file; a long question does not."""
    try:
        return Path(text).is_file()
    except OSError:
        return False


def _looks_like_picture(text: str) -> bool:
    """Whether a word of the command line is the path of a picture rather than a question, be it there or not."""
    if text.endswith("?"):
        return False
    has_ending = Path(text).suffix.lower() in PICTURE_ENDINGS
    has_folder = any(separator in text for separator in (os.sep, os.altsep) if separator)
    has_blanks = any(character.isspace() for character in text)
    return (has_ending and has_folder) if has_blanks else (has_ending or has_folder)


def refuse_path_as_question(name: str, text: str, remedy: str) -> None:
    """A picture where a question belongs: one that is there, or the path of one that is not."""
    if is_file(text):
        raise RequestError(name, f"{text} is a file, not a question; {remedy}")
    if _looks_like_picture(text):
        _refuse_folder(name, text)
        raise RequestError(name, f"{shown(text)} looks like a picture, and there is no such file; check the path")


def _refuse_folder(name: str, path: str) -> None:
    if os.path.isdir(os.path.expanduser(path)):
        remedy = f"give one picture, or all of them to `kestrel label {path} --objects NAME --output DIR`"
        raise RequestError(name, f"{shown(path)} is a folder; {remedy}")


def check_pictures(sources: Iterable[str]) -> None:
    """Refuse paths without a file."""
    for name in sources:
        _refuse_folder("image", name)
        if name != STDIN and not is_file(os.path.expanduser(name)):
            raise RequestError("image", f"there is no file {shown(name)}; give the path of a picture, or - for stdin")


async def read_picture(source: str, config: RuntimeConfig) -> RgbImage:
    return (await read_pictures([source], config))[source]


async def read_pictures(sources: Iterable[str], config: RuntimeConfig) -> dict[str, RgbImage]:
    """Decoded pictures by source, each read once, under the configuration's limits.

    Read before a model is loaded, so that a wrong path is reported immediately.
    """
    names = list(dict.fromkeys(sources))
    check_pictures(names)
    from kestrel.engine.pools import PicturePool  # noqa: PLC0415 - it imports numpy
    from kestrel.images.picture import RgbImage  # noqa: PLC0415

    pool = PicturePool(config)
    try:
        found = await pool.decode("command line", [_from_stdin(config) if name == STDIN else name for name in names])
    finally:
        pool.close()
    pictures = [picture for picture in found if isinstance(picture, RgbImage)]  # all: there is no model to reduce for
    return dict(zip(names, pictures, strict=True))


def _from_stdin(config: RuntimeConfig) -> bytes:
    if sys.stdin.isatty():
        raise RequestError("image", "- reads a picture from stdin, but nothing is piped in; give a file instead")
    return sys.stdin.buffer.read(config.max_image_bytes + 1)
