"""Heights and widths as text."""

from __future__ import annotations

import re

from kestrel.errors import ConfigError


def parse_size(flag: str, text: str) -> tuple[int, int]:
    """Height and width from "378x378"."""
    match = re.fullmatch(r"([0-9]{1,6})x([0-9]{1,6})", text.strip().lower())
    if match is None:
        raise ConfigError(flag, f"{text!r} is not a height and a width; write it as in 378x378")
    return int(match[1]), int(match[2])
