"""Adapters on the device: a fixed number of slots in buffers that never move, and the deltas of one step.

A slot is overwritten by a launch's `AdapterLoad`; whoever plans the launch makes sure that no row uses it any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from kestrel.adapters import Adapter, AdapterShape, AdapterTarget
from kestrel.adapters.adapter import MATRICES, SIDES
from kestrel.kernels.low_rank import SlotFactors, SlotRows, add_low_rank, stored_rank
from kestrel.models.contract import AdaptedMatrix, LayerFactors, SlotDeltas
from kestrel.runtime.contract import AdapterLoad
from kestrel.runtime.upload import upload

NO_SLOT = -1
"""Of positions of the base model, on the device."""
Place: TypeAlias = tuple[int, AdaptedMatrix]


class SlotBuffers(NamedTuple):
    """The factors of one matrix for all slots; with experts both have an expert dimension behind the slots."""

    a: Tensor
    """[slots, (experts,) rank, in]"""
    b: Tensor
    """[slots, (experts,) out, rank], the adapter's scale built in"""


class AdapterSlots:
    def __init__(
        self, shape: AdapterShape, num_slots: int, max_rank: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        rank = stored_rank(max_rank)
        self._buffers = {
            target: SlotBuffers(
                *(
                    torch.zeros(num_slots, *shape.tensor_shape(target, side, rank), dtype=dtype, device=device)
                    for side in SIDES
                )
            )
            for target in (AdapterTarget(layer, matrix) for layer in range(shape.num_layers) for matrix in MATRICES)
        }
        self._ranks: list[dict[Place, int]] = [{} for _ in range(num_slots)]
        # The same on the device, and one slot more for the base model, whose rank stays 0.
        sizes = (shape.num_layers, len(MATRICES), num_slots + 1)
        self._rank_LMS = torch.zeros(sizes, dtype=torch.int32, device=device)
        self._reads_norm_S = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        self._dense_layers = [self._layer_factors(layer) for layer in range(shape.num_dense_layers)]

    @property
    def num_slots(self) -> int:
        return len(self._ranks)

    def load(self, load: AdapterLoad) -> None:
        """Copies an adapter into a slot; targets that it lacks count as rank 0."""
        adapter = load.weights
        assert isinstance(adapter, Adapter)
        self._ranks[load.slot] = ranks_of(adapter)
        self._load_ranks(load.slot, adapter)
        for target, pair in adapter.targets.items():
            buffers = self._buffers[target]
            rank = pair.a.shape[-2]
            buffers.a[load.slot, ..., :rank, :].copy_(pair.a, non_blocking=True)
            scaled = pair.b if adapter.scale == 1.0 else pair.b.float() * adapter.scale
            buffers.b[load.slot, ..., :rank].copy_(scaled, non_blocking=True)
            buffers.a[load.slot, ..., rank : stored_rank(rank), :] = 0.0
            buffers.b[load.slot, ..., rank : stored_rank(rank)] = 0.0

    def _load_ranks(self, slot: int, adapter: Adapter) -> None:
        ranks = [
            [stored_rank(adapter.targets[target].a.shape[-2]) if target in adapter.targets else 0 for target in targets]
            for targets in (
                [AdapterTarget(layer, matrix) for matrix in MATRICES] for layer in range(len(self._rank_LMS))
            )
        ]
        self._rank_LMS[:, :, slot] = upload(ranks, self._rank_LMS.device, torch.int32)
        self._reads_norm_S[slot] = int(adapter.proj_input == "block_norm")

    def deltas(self, slot_T: Tensor) -> SlotDeltas:
        """For a step of a dense model whose positions use these slots, -1 for the base model."""
        assert len(self._dense_layers) == len(self._rank_LMS), "experts are adapted by `StepAdapt` alone"
        return SlotDeltas(slot_T, self.num_slots, self._dense_layers, self._reads_norm_S)

    def _layer_factors(self, layer: int) -> LayerFactors:
        return LayerFactors(
            **{
                matrix: SlotFactors(*self._buffers[AdapterTarget(layer, matrix)], self._rank_LMS[layer, at])
                for at, matrix in enumerate(MATRICES)
            }
        )

    def rank_at(self, slot: int, layer: int, matrix: AdaptedMatrix) -> int:
        """Rank of a slot's delta at a place (of one expert's, where there are experts); 0 where it adds nothing."""
        assert self._ranks[slot], "a row uses an empty slot"
        return self._ranks[slot].get((layer, matrix), 0)

    def buffers(self, layer: int, matrix: AdaptedMatrix) -> SlotBuffers:
        return self._buffers[AdapterTarget(layer, "proj" if matrix == "proj_of_norm" else matrix)]


def ranks_of(adapter: Adapter) -> dict[Place, int]:
    """By place, only where the adapter adds something."""
    reads_norm = adapter.proj_input == "block_norm"
    return {
        (layer, "proj_of_norm" if matrix == "proj" and reads_norm else matrix): pair.a.shape[-2]
        for (layer, matrix), pair in adapter.targets.items()
    }


class StepAdapt:
    """`kestrel.models.contract.Adapt` for a batch whose positions use several slots or none."""

    def __init__(self, slots: AdapterSlots, slot_of_position: Sequence[int | None], device: torch.device) -> None:
        self._slots = slots
        places: dict[int, list[int]] = {}
        for position, slot in enumerate(slot_of_position):
            if slot is not None:
                places.setdefault(slot, []).append(position)
        self._positions = {slot: upload(at, device) for slot, at in sorted(places.items())}
        self._slot_T = upload([NO_SLOT if slot is None else slot for slot in slot_of_position], device)

    def linear(self, layer: int, matrix: AdaptedMatrix, x_TD: Tensor, y_TF: Tensor) -> Tensor:
        users = [
            SlotRows(slot, rank, at_N)
            for slot, at_N in self._positions.items()
            if (rank := self._slots.rank_at(slot, layer, matrix))
        ]
        if not users:
            return y_TF
        a_SRD, b_SFR = self._slots.buffers(layer, matrix)
        return add_low_rank(y_TF, x_TD, users, a_SRD, b_SFR)

    def expert(
        self, layer: int, matrix: AdaptedMatrix, expert: int, positions_N: Tensor, x_ND: Tensor, y_NF: Tensor
    ) -> Tensor:
        slot_N = self._slot_T[positions_N]
        users = [
            SlotRows(slot, rank, (slot_N == slot).nonzero()[:, 0])
            for slot in self._positions
            if (rank := self._slots.rank_at(slot, layer, matrix))
        ]
        if not users:
            return y_NF
        a_SERD, b_SEFR = self._slots.buffers(layer, matrix)
        return add_low_rank(y_NF, x_ND, users, a_SERD[:, expert], b_SEFR[:, expert])
