"""The embedded model: a small Moondream 3 for demonstrations, as a model folder inside the package."""

from __future__ import annotations

from pathlib import Path

NAME = "kestrel-tiny"
FOLDER = Path(__file__).parent
DESCRIPTION = "The embedded demonstration model: a small Moondream 3 that knows drawn scenes only."
NUM_PARAMETERS = 11_872_248
LICENCE = "Apache-2.0"
_KNOWS = "kestrel-tiny is a small demonstration model that knows drawn scenes only, not photographs"
NOTICE = f"{_KNOWS}; for real pictures use a real model, for example moondream2"
COMMAND_NOTICE = f"{_KNOWS}; for real pictures name a real model, for example --model moondream2"
"""The same on the command line."""
