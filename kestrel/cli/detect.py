"""kestrel detect: a box around every instance of an object."""

from __future__ import annotations

from kestrel.cli.config_flags import with_flags
from kestrel.cli.one_skill import SkillCall, run_skill
from kestrel.cli.options import ImageArgument, ObjectArgument, ObjectSettings, SaveOptions
from kestrel.config import RuntimeConfig


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

    Prints the sides of each, from 0 to 1 across and down the picture; a box may reach beyond it.
    """
    run_skill(SkillCall("detect", {"object": object}, image, settings, output, config))
