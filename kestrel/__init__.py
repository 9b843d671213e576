"""Kestrel: an open inference engine for vision-language and text models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kestrel.client.model import vl as vl

__version__ = "0.1.0"


INSTEAD = {
    "photon": "call kestrel.vl(model)",
    "photon_models": "run `kestrel models`",
    "ft": "run `kestrel train adapter` (docs/fine-tuning.md)",
}
"""Of what the `moondream` package has beside `vl`."""


def __dir__() -> list[str]:
    return sorted({*globals(), "vl"})


def __getattr__(name: str) -> Any:
    """`kestrel.vl`, read when it is asked for: who uses a part of the package pays for that part."""
    if name == "vl":
        from kestrel.client.model import vl  # noqa: PLC0415

        return vl
    if name in INSTEAD:
        raise AttributeError(f"{name} is not in kestrel; {INSTEAD[name]}")
    raise AttributeError(f"module 'kestrel' has no attribute {name!r}")
