"""kestrel point: a point on every instance of an object."""

from __future__ import annotations

from kestrel.cli.config_flags import with_flags
from kestrel.cli.one_skill import SkillCall, run_skill
from kestrel.cli.options import (
    ImageArgument,
    ObjectArgument,
    ObjectSettings,
    SaveOptions,
    SpatialRefOption,
    parse_spatial_refs,
)
from kestrel.config import RuntimeConfig


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

    Prints x and y of each, from 0 to 1 across and down the picture.
    """
    fields = {"object": object, "spatial_refs": parse_spatial_refs(spatial_ref)}
    run_skill(SkillCall("point", fields, image, settings, output, config))
