"""Pictures of requests that have no row yet: encoded on the second stream while rows decode, and kept.

Each has an event of its own, so its prefill waits for nothing that was encoded after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from kestrel.runtime.contract import StepPlan, WaitingPicture
from kestrel.runtime.device import MadeBeside, SideStream
from kestrel.runtime.pictures import PictureEncoder


class PicturesToCome:
    def __init__(self, encoder: PictureEncoder, beside: SideStream) -> None:
        self._encoder = encoder
        self._beside = beside
        self._kept: dict[str, MadeBeside | None] = {}
        """None for one that failed: its prefill tries again, and tells."""

    def follow(self, plan: StepPlan) -> None:
        """Forget what is unwanted, encode what is ordered: one at a time, since a request that gets its row at once has
        its picture encoded behind those that are on their way."""
        for digest in plan.unwanted_pictures:
            self._kept.pop(digest, None)
        if plan.picture_ahead is not None and all(made is None or made.is_ready for made in self._kept.values()):
            self._kept[plan.picture_ahead.digest] = self._encode(plan.picture_ahead)

    def has_encoded(self, digest: str) -> bool:
        return digest in self._kept

    def take(self, digests: Iterable[str]) -> dict[str, MadeBeside]:
        """Those that are there, which have to be joined."""
        found = {digest: self._kept.pop(digest) for digest in set(digests) & set(self._kept)}
        return {digest: made for digest, made in found.items() if made is not None}

    def _encode(self, picture: WaitingPicture) -> MadeBeside | None:
        with self._beside.running(), suppress(Exception):
            return self._beside.made([self._encoder.encode_alone(picture.image)])[0]
        return None
