"""The sprites that tests draw scenes with: from the fonts where they are installed, else from a saved atlas."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

from kestrel.train.scenes.atlas import DEFAULT_ATLAS_PATH, SpriteAtlas, build_atlas
from kestrel.train.scenes.fonts import missing_fonts

REPOSITORY = Path(__file__).parents[1]


@lru_cache
def sprite_atlas() -> SpriteAtlas:
    """Skips the test where there is neither."""
    missing = missing_fonts()
    if not missing:
        return build_atlas()
    saved = REPOSITORY / DEFAULT_ATLAS_PATH
    if saved.exists():
        return SpriteAtlas.load(saved)
    pytest.skip(f"no {', '.join(missing)} (scripts/install-fonts) and no {DEFAULT_ATLAS_PATH}")
