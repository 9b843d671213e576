"""Which adapter is in which device slot, and who uses it.

A slot stays with its adapter after the last user left, and goes to another adapter only when none is free: the one left
longest ago makes room. Whoever holds a `SlotLease` keeps the slot; `release()` once.
"""

from __future__ import annotations

from kestrel.request import AdapterUse
from kestrel.runtime.contract import AdapterLoad


class SlotLease:
    """The right of one sequence to a slot."""

    def __init__(self, pool: SlotPool, slot: int) -> None:
        self._pool = pool
        self.slot = slot

    def release(self) -> None:
        self._pool.give_back(self)


class SlotPool:
    def __init__(self, num_slots: int) -> None:
        self._unused = list(range(num_slots - 1, -1, -1))
        self._num_slots = num_slots
        self._slot_of: dict[str, int] = {}
        self._adapter_in: dict[int, AdapterUse] = {}
        self._leases: dict[int, set[SlotLease]] = {slot: set() for slot in range(num_slots)}
        self._idle: dict[int, None] = {}  # with an adapter and without users, the one left longest ago first
        self._loads: dict[int, AdapterLoad] = {}
        self.num_loads = 0
        """Since the start."""

    @property
    def num_slots(self) -> int:
        return self._num_slots

    @property
    def num_free(self) -> int:
        """Slots that another adapter could have."""
        return len(self._unused) + len(self._idle)

    @property
    def num_leases(self) -> int:
        return sum(map(len, self._leases.values()))

    def running(self) -> list[str]:
        """Names of the adapters in use. Other threads may ask this too."""
        adapters = self._adapter_in.copy()
        return sorted({use.name for slot, use in adapters.items() if self._leases[slot]})

    def holds(self, use: AdapterUse) -> bool:
        return use.key in self._slot_of

    def try_acquire(self, use: AdapterUse) -> SlotLease | None:
        """A lease on the adapter's slot, None when every slot is in use for another."""
        slot = self._slot_of.get(use.key)
        if slot is None:
            slot = self._free_slot()
            if slot is None:
                return None
            self._put(use, slot)
        self._idle.pop(slot, None)
        lease = SlotLease(self, slot)
        self._leases[slot].add(lease)
        return lease

    def give_back(self, lease: SlotLease) -> None:
        users = self._leases[lease.slot]
        assert lease in users, "a slot was released twice"
        users.remove(lease)
        if not users:
            self._idle[lease.slot] = None

    def take_loads(self) -> list[AdapterLoad]:
        """What the next launch has to copy into slots."""
        loads, self._loads = list(self._loads.values()), {}
        return loads

    def check_integrity(self) -> None:
        assert len(self._unused) + len(self._adapter_in) == self._num_slots, "a slot is lost"
        assert {use.key: slot for slot, use in self._adapter_in.items()} == self._slot_of, "slots disagree"
        assert set(self._idle) == {slot for slot in self._adapter_in if not self._leases[slot]}, "idle slots miscounted"
        assert not any(self._leases[slot] for slot in self._unused), "an empty slot is in use"

    def _free_slot(self) -> int | None:
        if self._unused:
            return self._unused.pop()
        slot = next(iter(self._idle), None)
        if slot is not None:
            del self._idle[slot]
            del self._slot_of[self._adapter_in.pop(slot).key]
        return slot

    def _put(self, use: AdapterUse, slot: int) -> None:
        self._slot_of[use.key], self._adapter_in[slot] = slot, use
        self._loads[slot] = AdapterLoad(slot, use.key, use.weights)
        self.num_loads += 1
