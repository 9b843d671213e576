"""Which pictures of a plan have to be sent: one that is encoded in slices is named by many plans, and sent once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from kestrel.images.picture import Picture
from kestrel.runtime.contract import PrefillChunk, StepPlan
from kestrel.tokens import ImageSpan

MAX_PICTURES = 8
"""Held at a time; the oldest is let go, and sent again if it is named again."""
MAX_BYTES = 2**27
"""Likewise, of all but the newest: whoever asked about one may have left before it was prefilled."""


@dataclass(frozen=True, slots=True)
class Held:
    num_bytes: int
    image: Picture | None
    """None on the side that sent it."""


class HeldPictures:
    """Pictures that were sent and not prefilled yet. Both sides keep this account, by the same plans."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}

    def __iter__(self) -> Iterator[str]:
        """Their digests."""
        return iter(self._held)

    def missing(self, plan: StepPlan) -> tuple[Picture, ...]:
        """What has to be sent with a plan; from then on it counts as sent."""
        named = _pictures_of(plan)
        missing = tuple(picture for digest, picture in named.items() if digest not in self._held)
        self._follow(plan, {picture.digest: Held(picture.num_bytes, None) for picture in missing})
        return missing

    def complete(self, plan: StepPlan, sent: tuple[Picture, ...]) -> None:
        """Puts the pictures back into a plan that came with `sent`."""
        arrived = {picture.digest: Held(picture.num_bytes, picture) for picture in sent}
        known = {digest: held.image for digest, held in {**self._held, **arrived}.items()}
        plan.prefill = [_with_picture(chunk, known) for chunk in plan.prefill]
        plan.picture_slices = [replace(slice_, image=known.get(slice_.digest)) for slice_ in plan.picture_slices]
        self._follow(plan, arrived)

    def _follow(self, plan: StepPlan, new: Mapping[str, Held]) -> None:
        for slice_ in plan.picture_slices:
            self._held.setdefault(slice_.digest, new.get(slice_.digest, Held(0, None)))
        for chunk in plan.prefill:
            self._held.pop(_digest_of(chunk) or "", None)
        while len(self._held) > 1 and (len(self._held) > MAX_PICTURES or self._num_bytes > MAX_BYTES):
            del self._held[next(iter(self._held))]

    @property
    def _num_bytes(self) -> int:
        return sum(held.num_bytes for held in self._held.values())


def _pictures_of(plan: StepPlan) -> dict[str, Picture]:
    named = {slice_.digest: slice_.image for slice_ in plan.picture_slices}
    for chunk in plan.prefill:
        digest = _digest_of(chunk)
        if digest is not None:
            named[digest] = chunk.images.get(digest)
    return {digest: picture for digest, picture in named.items() if picture is not None}


def _with_picture(chunk: PrefillChunk, known: Mapping[str, Picture | None]) -> PrefillChunk:
    digest = _digest_of(chunk)
    picture = None if digest is None else known.get(digest)
    return chunk if picture is None else replace(chunk, images={digest: picture})


def _digest_of(chunk: PrefillChunk) -> str | None:
    first = chunk.items[0]
    return first.digest if isinstance(first, ImageSpan) else None
