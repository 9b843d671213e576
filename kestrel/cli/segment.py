"""kestrel segment: the outline of an object."""

from __future__ import annotations

from kestrel.cli.config_flags import with_flags
from kestrel.cli.one_skill import SkillCall, run_skill
from kestrel.cli.options import (
    ImageArgument,
    ObjectArgument,
    SaveOptions,
    SpatialRefOption,
    TextSettings,
    parse_spatial_refs,
)
from kestrel.config import RuntimeConfig


@with_flags
def segment(
    image: ImageArgument,
    object: ObjectArgument,
    spatial_ref: SpatialRefOption = None,
    *,
    settings: TextSettings,
    output: SaveOptions,
    config: RuntimeConfig,
) -> None:
    """Outline an object.

    Prints its box, from 0 to 1 across and down the picture, and an SVG path relative to that box.
    """
    fields = {"object": object, "spatial_refs": parse_spatial_refs(spatial_ref)}
    run_skill(SkillCall("segment", fields, image, settings, output, config))
