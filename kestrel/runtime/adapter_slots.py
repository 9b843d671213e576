"""Adapters on the device: a fixed number of slots in buffers that never move, and the deltas of one step.

A slot is overwritten by a launch's `AdapterLoad`; whoever plans the launch makes sure that no row uses it any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from kestrel.adapters import Adapter, AdapterShape, AdapterTarget, LowRankPair
from kestrel.adapters.adapter import Side
from kestrel.kernels.low_rank import SlotFactors, stored_rank
from kestrel.kernels.moe_mlp import ExpertDeltas, ExpertFactors, Gate
from kestrel.kernels.ops import Ops
from kestrel.layers.adapt import Adapt
from kestrel.layers.linear import COLUMNS, ROWS, ExpertMatrices, Linear
from kestrel.parallel.ranks import Part
from kestrel.runtime.contract import AdapterLoad
from kestrel.runtime.device import upload

NO_SLOT = -1
"""Of positions of the base model, on the device."""
SPLIT_SIDE: Mapping[Side, int] = {"a": COLUMNS, "b": ROWS}
"""The dimension of a split matrix that a factor has too: inputs that a rank lacks are those of `a`, outputs of `b`."""
NO_PARTS: Mapping[tuple[int, str], Part] = MappingProxyType({})


class SlotBuffers(NamedTuple):
    """The factors of one matrix for all slots; with experts both have an expert dimension behind the slots."""

    a: Tensor
    """[slots, (experts,) rank, in]"""
    b: Tensor
    """[slots, (experts,) out, rank], the adapter's scale built in. Without experts ranks lie outermost in memory."""
    rank_S: Tensor
    """One longer: the base model counts as the last slot, of rank 0."""


class AdapterSlots:
    def __init__(
        self,
        shape: AdapterShape,
        num_slots: int,
        max_rank: int,
        device: torch.device,
        dtype: torch.dtype,
        parts: Mapping[tuple[int, str], Part] = NO_PARTS,
    ) -> None:
        """`parts`: by layer and place, of matrices that other ranks have the rest of."""
        rank, places = stored_rank(max_rank), [shape.places(layer) for layer in range(shape.num_layers)]
        self._names = {(layer, place): names for layer, own in enumerate(places) for place, names in own.items()}
        self._rank_PS = torch.zeros(len(self._names), num_slots + 1, dtype=torch.int32, device=device)

        def zeros(key: tuple[int, str], side: Side) -> Tensor:
            size, part = shape.place_shape(*key, side, rank), parts.get(key)
            own = part.own_shape(size) if part is not None and part.dim == SPLIT_SIDE[side] else size
            if side == "b" and len(own) == 2:
                return torch.zeros(num_slots, own[1], own[0], dtype=dtype, device=device).mT
            return torch.zeros(num_slots, *own, dtype=dtype, device=device)

        self._buffers = {
            key: SlotBuffers(zeros(key, "a"), zeros(key, "b"), rank_S)
            for key, rank_S in zip(self._names, self._rank_PS, strict=True)
        }
        self.num_slots = num_slots
        self._shape, self._parts = shape, parts
        self.reads_norm_S = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        """Whether a slot's delta of proj reads the block's norm output; int32, with an entry for the base model."""

    def load(self, load: AdapterLoad) -> None:
        """Copies an adapter into a slot; targets that it lacks count as rank 0."""
        adapter = load.weights
        assert isinstance(adapter, Adapter)
        ranks = [self._rank(adapter, layer, names) for (layer, _), names in self._names.items()]
        self._rank_PS[:, load.slot] = upload(ranks, self._rank_PS.device, torch.int32)
        self.reads_norm_S[load.slot] = int(adapter.proj_input == "block_norm")
        for key in self._names:
            self._load_place(load.slot, adapter, *key)

    def _load_place(self, slot: int, adapter: Adapter, layer: int, place: str) -> None:
        """Factors of parts stand side by side: each delta adds to the rows of its own part."""
        buffers, names, end = self._buffers[layer, place], self._names[layer, place], 0
        for target in (AdapterTarget(layer, name) for name in names):
            pair = adapter.targets.get(target)
            if pair is None:
                continue
            start, end = end, end + pair.a.shape[-2]
            own, first_row = self._own_part(pair, target, place)
            buffers.a[slot, ..., start:end, :].copy_(own.a, non_blocking=True)
            scaled = own.b if adapter.scale == 1.0 else own.b.float() * adapter.scale
            rows = slice(None)
            if len(names) > 1:
                rows = slice(first_row, first_row + own.b.shape[-2])
                buffers.b[slot, ..., start:end] = 0.0
            buffers.b[slot, ..., rows, start:end].copy_(scaled, non_blocking=True)
        if end:
            buffers.a[slot, ..., end : stored_rank(end), :] = 0.0
            buffers.b[slot, ..., end : stored_rank(end)] = 0.0

    def _own_part(self, pair: LowRankPair, target: AdapterTarget, place: str) -> tuple[LowRankPair, int]:
        """The factors that belong to this rank's part of the matrix, and the first row there that they add to."""
        matrix, part = self._shape.layers[target.layer][target.matrix], self._parts.get((target.layer, place))
        if part is None:
            return pair, matrix.first_row
        if part.dim == SPLIT_SIDE["a"]:
            return LowRankPair(part.cut(pair.a), pair.b), matrix.first_row
        own_rows = part.within(matrix.first_row, matrix.rows)
        return LowRankPair(pair.a, own_rows.cut(pair.b)), part.within(0, matrix.first_row).size

    def _rank(self, adapter: Adapter, layer: int, names: Sequence[str]) -> int:
        """Of all parts, as kernels read it: filled up with zeros, except for experts, which may have any rank."""
        targets = [AdapterTarget(layer, name) for name in names]
        rank = sum(adapter.targets[target].a.shape[-2] for target in targets if target in adapter.targets)
        return rank if self._shape.experts_of(targets[0]) is not None else stored_rank(rank)

    def has(self, layer: int, matrix: str) -> bool:
        return (layer, matrix) in self._buffers

    def factors(self, layer: int, matrix: str) -> SlotFactors:
        """Of a single matrix."""
        a_SRD, b_SFR, rank_S = self._buffers[layer, matrix]
        return SlotFactors(a_SRD, b_SFR.mT, rank_S)

    def expert_factors(self, layer: int, matrix: str) -> ExpertFactors:
        return ExpertFactors(*self._buffers[layer, matrix])


class SlotAdapt(Adapt):
    """The adapters of a step as tensors alone: what is captured with them can be replayed for other slots and ranks.

    In fp32 on a CPU, positions of the base model get what they get without adapters in a batch of the same shape, bit
    by bit. On a GPU that holds for steps whose positions are a handful (`Linear.is_small`); in larger ones their hidden
    numbers are rounded to the model's dtype before the activation and not only after it.
    """

    def __init__(self, slots: AdapterSlots, slot_T: Tensor, ops: Ops) -> None:
        """`slot_T`: of each position, -1 for the base model."""
        self._is_base_T = slot_T < 0
        self._slots = slots
        self._slot_T = slot_T
        self._ops = ops
        self._tiles = ops.tile_slots(slot_T, slots.num_slots)

    def linear(self, layer: int, matrix: str, x_TD: Tensor, y_TF: Tensor) -> Tensor:
        if self._slots.has(layer, matrix):
            self._ops.add_deltas(self._tiles, y_TF, x_TD, self._slots.factors(layer, matrix))
        return y_TF

    def product(self, layer: int, matrix: str, base: Linear, x_TD: Tensor, *, has_gelu: bool = False) -> Tensor:
        """Of a handful of positions, those of the base model get what they get without adapters, bit by bit: their
        GELU belongs to the product, while that of adapted ones must wait for the delta."""
        if not (base.is_small(x_TD) and self._slots.has(layer, matrix)):
            return super().product(layer, matrix, base, x_TD, has_gelu=has_gelu)
        return self._small_product(
            base, x_TD, self._slots.factors(layer, matrix), is_base_M=self._is_base_T if has_gelu else None
        )

    def proj_product(self, layer: int, base: Linear, mixed_TD: Tensor, y_TD: Tensor) -> Tensor:
        if not base.is_small(mixed_TD):
            return super().proj_product(layer, base, mixed_TD, y_TD)
        factors = self._slots.factors(layer, "proj")
        return self._small_product(base, mixed_TD, factors, other_MD=y_TD, reads_other_S=self._slots.reads_norm_S)

    def _small_product(self, base: Linear, x_MD: Tensor, factors: SlotFactors, **how: Tensor | None) -> Tensor:
        return self._ops.small_adapted_linear(
            self._tiles, x_MD, base.weight, base.bias, factors, scale_F=base.scale_F, is_beside=base.is_beside, **how
        )

    def proj(self, layer: int, mixed_TD: Tensor, y_TD: Tensor, out_TD: Tensor) -> Tensor:
        factors = self._slots.factors(layer, "proj")
        self._ops.add_deltas(self._tiles, out_TD, mixed_TD, factors, y_TD, self._slots.reads_norm_S)
        return out_TD

    def parallel_inputs(self, layer: int, y_TD: Tensor, qkv_TF: Tensor, hidden_TF: Tensor) -> tuple[Tensor, Tensor]:
        qkv, fc1 = self._slots.factors(layer, "qkv"), self._slots.factors(layer, "fc1")
        self._ops.add_input_deltas(self._tiles, y_TD, qkv_TF, qkv, hidden_TF, fc1)
        return qkv_TF, hidden_TF

    def parallel_outputs(
        self, layer: int, total_TD: Tensor, mixed_TD: Tensor, y_TD: Tensor, hidden_TF: Tensor
    ) -> Tensor:
        proj, fc2 = self._slots.factors(layer, "proj"), self._slots.factors(layer, "fc2")
        self._ops.add_output_deltas(
            self._tiles, total_TD, mixed_TD, y_TD, self._slots.reads_norm_S, proj, hidden_TF, fc2
        )
        return total_TD

    def experts(
        self,
        layer: int,
        x_TD: Tensor,
        weights_TK: Tensor,
        ids_TK: Tensor,
        fc1: ExpertMatrices,
        fc2: ExpertMatrices,
        gate: Gate,
    ) -> Tensor:
        factors = (self._slots.expert_factors(layer, "fc1"), self._slots.expert_factors(layer, "fc2"))
        return self._ops.moe_mlp_adapted(
            x_TD, weights_TK, ids_TK, fc1.weight, fc2.weight, fc1.scale_EF, fc2.scale_EF,
            ExpertDeltas(self._slot_T, *factors), gate=gate,
        )  # fmt: skip
