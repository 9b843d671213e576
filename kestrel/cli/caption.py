"""kestrel caption: a picture described in words."""

from __future__ import annotations

from typing import Annotated

import typer

from kestrel.cli.config_flags import with_flags
from kestrel.cli.one_skill import SkillCall, run_skill
from kestrel.cli.options import ImageArgument, TextOutputOptions, TextSettings
from kestrel.config import RuntimeConfig


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
    run_skill(SkillCall("caption", {"length": length}, image, settings, output, config))
