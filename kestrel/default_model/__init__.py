"""The embedded model: a small Moondream 3 for demonstrations, as a model folder inside the package."""

from __future__ import annotations

from pathlib import Path

NAME = "kestrel-tiny"
FOLDER = Path(__file__).parent
DESCRIPTION = "The embedded demonstration model: a small Moondream 3 that knows drawn scenes only."
NUM_PARAMETERS = 11_872_248
LICENCE = "Apache-2.0"
NOTICE = (
    "kestrel-tiny is a small demonstration model that knows drawn scenes only, not photographs; "
    "for real pictures name a real model, for example --model moondream2"
)
