"""Names of adapters. They come from strangers, so only a short, plain form is an id, and none ever touches a path."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kestrel.errors import RequestError, shown

FIELD = "adapter"
MAX_NAME_LENGTH = 64
MAX_STEP_DIGITS = 12

_FORM = re.compile(rf"([A-Za-z0-9_-]{{1,{MAX_NAME_LENGTH}}})(?:@([0-9]{{1,{MAX_STEP_DIGITS}}}))?")


@dataclass(frozen=True, slots=True)
class AdapterId:
    """`{finetune_id}@{step}`, or a plain name."""

    name: str
    """A fine-tune's id, or the name of a local adapter."""
    step: str | None = None

    def __str__(self) -> str:
        return self.name if self.step is None else f"{self.name}@{self.step}"

    @classmethod
    def parse(cls, text: object) -> AdapterId:
        """Raises RequestError for everything that is not exactly an id."""
        found = _FORM.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise RequestError(
                FIELD,
                f"{shown(text)} is not an adapter id; write finetune_id@step or a name (up to {MAX_NAME_LENGTH} "
                f"letters A-Z a-z, digits, - and _; the step is a number of up to {MAX_STEP_DIGITS} digits)",
            )
        return cls(found[1], found[2])

    @classmethod
    def try_parse(cls, text: str) -> AdapterId | None:
        found = _FORM.fullmatch(text)
        return None if found is None else cls(found[1], found[2])
