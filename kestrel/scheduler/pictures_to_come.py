"""Which pictures are encoded before their requests have a row, beside steps that only decode.

Such a step leaves most of a GPU idle. With few rows they often end together, and the next requests would begin with
encoding their pictures. One picture comes at a time, of those who would get the next rows. No more are ordered than the
runtime keeps, and none is given up while its request waits: so none is encoded twice.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

from kestrel.runtime.contract import StepPlan, WaitingPicture
from kestrel.scheduler.admission import Admission
from kestrel.scheduler.sequence import Sequence, Stage


class PicturesToCome:
    def __init__(self, admission: Admission, has_encoded: Callable[[str], bool], most: int) -> None:
        self._admission = admission
        self._has_encoded = has_encoded
        self._most = most
        # Weakly, since a request that is over would take its picture's memory until the next look.
        self._kept: dict[str, ref[Sequence]] = {}
        """By digest: for whom the runtime keeps it, if it took the order."""
        self._next: dict[str, ref[Sequence]] = {}
        """Likewise: who comes next and needs a picture, in their order."""
        self._next_as_of = -1

    def add_to(self, plan: StepPlan, now_s: float) -> None:
        """Order the next picture, and give up those whose requests are gone or found it in the prefix cache. They stay
        until a step like this comes."""
        self._look_who_is_next(now_s)
        self._drop_unwanted(plan)
        if len(self._kept) >= self._most:
            return
        for digest, waiting in self._next.items():
            sequence = waiting()
            if sequence is not None and not self._has_encoded(digest):
                plan.picture_ahead = WaitingPicture(digest, sequence.request.images.get(digest))
                self._kept[digest] = waiting
                return

    def _look_who_is_next(self, now_s: float) -> None:
        if self._next_as_of == self._admission.num_changes:
            return
        self._next = {}
        for sequence in self._admission.soonest(self._most, now_s):
            digest = self._admission.picture_to_encode(sequence)
            if digest is not None:
                self._next.setdefault(digest, ref(sequence))
        self._next_as_of = self._admission.num_changes

    def _drop_unwanted(self, plan: StepPlan) -> None:
        kept = {digest: owner for digest, owner in self._kept.items() if self._has_encoded(digest)}
        self._kept = {}
        for digest, owner in kept.items():
            heir = self._next.get(digest, owner)
            if (sequence := heir()) is not None and sequence.stage is Stage.WAITING:
                self._kept[digest] = heir
            else:
                plan.unwanted_pictures.append(digest)
