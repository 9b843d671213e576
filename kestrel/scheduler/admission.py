"""Who may start: rows, pages, adapter slots, and one prefill per picture.

Requests about a picture that another sequence is just prefilling are parked until that picture is in the prefix cache,
so that each picture is encoded once however many ask about it at the same time. A sequence that must compute its whole
prompt, because outputs of the prompt are asked for, neither waits for a picture nor lets others wait.

Requests for an adapter that is in no slot, while all slots are in use, wait aside: those of the base model pass them.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

from kestrel.cache import CacheManager
from kestrel.errors import OutOfPages
from kestrel.request import CacheNamespace
from kestrel.scheduler.queues import SlotWaiters, WaitingQueue
from kestrel.scheduler.sequence import Sequence, SlotPool, Stage
from kestrel.tokens import ContextItem, ImageSpan


class DeferReason(Enum):
    NO_PAGES = "no free pages"
    NO_ADAPTER_SLOT = "no free adapter slot"
    IMAGE_IN_PROGRESS = "the same picture is being prefilled"


PictureKey: TypeAlias = tuple[CacheNamespace, tuple[ContextItem, ...]]


class Admission:
    def __init__(self, cache: CacheManager, queue: WaitingQueue, num_rows: int, slots: SlotPool) -> None:
        self._cache = cache
        self._queue = queue
        self._slots = slots
        self._slot_waiters = SlotWaiters()
        self._called: set[Sequence] = set()
        """Back from there for a free slot, which others who wait must not refuse them."""
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._num_rows = num_rows
        self._waits_for_release = False
        self._picture_owner: dict[PictureKey, Sequence] = {}
        self._picture_of: dict[Sequence, PictureKey] = {}
        self._parked: dict[PictureKey, list[Sequence]] = {}
        self._num_parked = 0

    @property
    def num_parked(self) -> int:
        return self._num_parked + len(self._slot_waiters)

    def is_parked(self, sequence: Sequence) -> bool:
        return self._waits_for_picture(sequence) or sequence in self._slot_waiters

    def waiting_adapters(self) -> list[str]:
        """Names of the adapters that wait for a slot. Other threads may ask this too."""
        return self._slot_waiters.names()

    def admit_waiting(self, now_s: float) -> list[Sequence]:
        """Start waiting sequences in order until rows or pages run out."""
        admitted: list[Sequence] = []
        for _ in range(self._slots.num_free):
            for sequence in self._slot_waiters.pop_next(self._queue.turn_of):
                self._called.add(sequence)
                self._queue.push(sequence)
        while self._free_rows and not self._waits_for_release:
            sequence = self._queue.try_pop(now_s)
            if sequence is None:
                break
            match self._try_start(sequence, now_s):
                case None:
                    admitted.append(sequence)
                case DeferReason.IMAGE_IN_PROGRESS:
                    self._park(sequence)
                case DeferReason.NO_ADAPTER_SLOT:
                    self._called.discard(sequence)
                    self._slot_waiters.push(sequence, now_s)
                case DeferReason.NO_PAGES:
                    self._queue.push(sequence)
                    self._waits_for_release = True
        return admitted

    @property
    def num_changes(self) -> int:
        """`soonest` says the same until there is another."""
        return self._queue.num_changes

    def soonest(self, most: int, now_s: float) -> list[Sequence]:
        """Who would be admitted next."""
        return self._queue.soonest(most, now_s)

    def picture_to_encode(self, sequence: Sequence) -> str | None:
        """The digest of a waiting sequence's first picture, if that has to be encoded for it as things stand."""
        leading, use = sequence.leading_picture, sequence.request.adapter
        if leading is None or (use is not None and not self._slots.could_hold(use)):
            return None
        if sequence.reads_prefix_cache:
            is_on_its_way = self._picture_key(sequence) in self._picture_owner
            if is_on_its_way or self._cache.holds(sequence.request.namespace, leading):
                return None
        picture = leading[-1]
        assert isinstance(picture, ImageSpan)
        return picture.digest

    def _try_start(self, sequence: Sequence, now_s: float) -> DeferReason | None:
        """Why it cannot start on a free row now; None when it did."""
        if sequence.reads_prefix_cache and self._picture_key(sequence) in self._picture_owner:
            return DeferReason.IMAGE_IN_PROGRESS
        use = sequence.request.adapter
        slot = None
        if use is not None and (sequence in self._called or self._slot_waiters.may_pass(sequence, now_s)):
            slot = self._slots.try_acquire(use)
        if use is not None and slot is None:
            return DeferReason.NO_ADAPTER_SLOT
        try:
            lease = self._cache.acquire(sequence.request.namespace, sequence.items, reuse=sequence.reads_prefix_cache)
        except OutOfPages:
            if slot is not None:
                slot.release()
            return DeferReason.NO_PAGES
        self._called.discard(sequence)
        sequence.start(self._free_rows.pop(), lease, slot)
        self._queue.took_row(sequence)
        self._own_missing_picture(sequence)
        return None

    def release(self, sequence: Sequence) -> None:
        """Take back the row and pages of a sequence that no step names any more."""
        assert sequence.lease is not None
        sequence.lease.release()
        sequence.lease = None
        if sequence.slot_lease is not None:
            sequence.slot_lease.release()
            sequence.slot_lease = None
        self._free_rows.append(sequence.row)
        self._queue.gave_row(sequence)
        self._waits_for_release = False
        self.picture_done(sequence)

    def hold_until_release(self) -> None:
        """After a preemption nothing new starts before something ends, or the two would take turns."""
        self._waits_for_release = True

    def picture_done(self, sequence: Sequence) -> None:
        """The sequence's first picture is shared now (or given up): those parked behind it may try."""
        key = self._picture_of.pop(sequence, None)
        if key is None:
            return
        del self._picture_owner[key]
        for parked in self._parked.pop(key, ()):
            self._num_parked -= 1
            self._queue.push(parked)

    def forget(self, sequence: Sequence) -> None:
        """Drop a sequence that never started from the queue or the parked ones."""
        self._called.discard(sequence)
        if sequence in self._slot_waiters:
            self._slot_waiters.remove(sequence)
        key = self._picture_key(sequence)
        if key is not None and self._waits_for_picture(sequence):
            self._parked[key].remove(sequence)
            self._num_parked -= 1
        self._queue.remove(sequence)

    def check_integrity(self, holders: list[Sequence]) -> None:
        self._queue.check_integrity(holders)
        assert len(self._free_rows) + len(holders) == self._num_rows, "a row is lost or held twice"
        assert len(set(self._free_rows)) == len(self._free_rows), "a row is free twice"
        assert set(self._parked) <= set(self._picture_owner), "sequences are parked behind no one"
        assert sum(map(len, self._parked.values())) == self._num_parked, "the parked are miscounted"
        for sequence, key in self._picture_of.items():
            assert self._picture_owner[key] is sequence, "a picture has two owners"
        assert len(self._picture_of) == len(self._picture_owner), "a picture has no owner"
        assert all(sequence.stage is Stage.WAITING for sequence in self._called), "one is called that does not wait"

    def _waits_for_picture(self, sequence: Sequence) -> bool:
        key = self._picture_key(sequence)
        return key is not None and sequence in self._parked.get(key, ())

    def _park(self, sequence: Sequence) -> None:
        key = self._picture_key(sequence)
        assert key is not None
        self._parked.setdefault(key, []).append(sequence)
        self._num_parked += 1

    def _own_missing_picture(self, sequence: Sequence) -> None:
        key = self._picture_key(sequence)
        if not sequence.reads_prefix_cache or not self._cache.shares_prefixes:
            return
        if key is not None and sequence.misses_leading_picture:
            self._picture_owner[key] = sequence
            self._picture_of[sequence] = key

    def _picture_key(self, sequence: Sequence) -> PictureKey | None:
        if sequence.leading_picture is None:
            return None
        return sequence.request.namespace, sequence.leading_picture
