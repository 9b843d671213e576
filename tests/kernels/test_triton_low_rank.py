"""The Triton version of the low-rank deltas against the plain one, and that against one row after the other."""

from __future__ import annotations

from tests.kernels.triton_mode import HALF, Draw, devices, distance  # isort: skip - before any kernel

from dataclasses import dataclass, fields
from random import Random

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kestrel.kernels import low_rank as plain
from kestrel.kernels.low_rank import SlotFactors, SlotTiles, stored_rank
from kestrel.kernels.triton import low_rank as fast
from kestrel.kernels.triton.launch import NO_TABLE, TunedSize, TuningTable
from kestrel.kernels.triton.linear import Tuning as LinearTuning
from kestrel.kernels.triton.linear import small_linear
from kestrel.kernels.triton.low_rank import Tuning
from tests.exhaustive import sweep

DIM, QKV, FF = 96, 130, 200
ODD = "odd ranks and an empty slot"
SHAPES = {
    "one row": (1, 8, [8]),
    ODD: (37, 48, [6, 48, 0, 17]),
    "the largest rank beside a small one": (5, 512, [512, 8]),
    "all adapters and the base": (16, 40, [33, 7, 40, 16]),
    "several tiles of one adapter": (70, 16, [16]),
    "more slots than rows": (3, 24, [8, 16, 24, 1, 2, 3]),
}


@dataclass
class Block:
    """The numbers of one block of layers, for some rows."""

    y: Tensor
    qkv: Tensor
    hidden: Tensor
    mixed: Tensor
    total: Tensor
    reads_norm: Tensor
    factors: dict[str, SlotFactors]

    @classmethod
    def drawn(cls, shape: str, device: str, dtype: torch.dtype, dims: tuple[int, int, int] = (DIM, QKV, FF)) -> Block:
        """`dims`: of rows, of the fused projection and of hidden rows."""
        dim, qkv_dim, ff_dim = dims
        num_rows, max_rank, ranks = SHAPES[shape]
        draw = Draw(device, dtype)

        def factors(num_out: int, num_in: int) -> SlotFactors:
            width = stored_rank(max_rank)
            a, b = draw(len(ranks), width, num_in, scale=0.1), draw(len(ranks), width, num_out, scale=0.3)
            for slot, rank in enumerate(ranks):
                a[slot, rank : stored_rank(rank)] = b[slot, rank : stored_rank(rank)] = 0.0
            stored = [stored_rank(rank) for rank in (*ranks, 0)]
            return SlotFactors(a, b, torch.tensor(stored, dtype=torch.int32, device=device))

        sizes = {"qkv": (qkv_dim, dim), "fc1": (ff_dim, dim), "proj": (dim, dim), "fc2": (dim, ff_dim)}
        reads_norm = torch.tensor([slot % 2 for slot in range(len(ranks))] + [0], dtype=torch.int32, device=device)
        wide = draw(num_rows, qkv_dim + ff_dim)
        return cls(
            draw(num_rows, dim), wide[:, :qkv_dim], wide[:, qkv_dim:], draw(num_rows, dim), draw(num_rows, dim),
            reads_norm,
            {name: factors(*size) for name, size in sizes.items()},
        )  # fmt: skip

    def to(self, dtype: torch.dtype) -> Block:
        """A copy; hidden stays beside qkv."""
        width = self.qkv.shape[1]
        wide = torch.cat((self.qkv, self.hidden), dim=1).to(dtype)
        factors = {n: SlotFactors(f.a_SRD.to(dtype), f.b_SRF.to(dtype), f.rank_S) for n, f in self.factors.items()}
        copies = {
            field.name: getattr(self, field.name).to(dtype, copy=True)
            for field in fields(self)
            if field.name in ("y", "mixed", "total")
        }
        return Block(
            **copies, qkv=wide[:, :width], hidden=wide[:, width:], reads_norm=self.reads_norm, factors=factors
        )  # fmt: skip

    def adapt(self, ops: object, tiles: SlotTiles) -> Block:
        f, own = self.factors, self.to(self.y.dtype)
        add_inputs, add_outputs = ops.add_input_deltas, ops.add_output_deltas  # type: ignore[attr-defined]
        add_inputs(tiles, own.y, own.qkv, f["qkv"], own.hidden, f["fc1"])
        add_outputs(tiles, own.total, own.mixed, own.y, own.reads_norm, f["proj"], own.hidden, f["fc2"])
        return own

    def by_rows(self, owners: list[int]) -> Block:
        """The formula, row by row."""
        own = self.to(self.y.dtype)

        def delta(name: str, x: Tensor, slot: int) -> Tensor:
            a, b, rank = self.factors[name]
            r = int(rank[slot])
            return b[slot][:r].T @ (a[slot][:r] @ x)

        for n, slot in enumerate(owners):
            if slot >= 0:
                own.qkv[n] += delta("qkv", own.y[n], slot)
                own.hidden[n] += delta("fc1", own.y[n], slot)
            own.hidden[n] = functional.gelu(own.hidden[n], approximate="tanh")
            if slot >= 0:
                x = own.y[n] if self.reads_norm[slot] else own.mixed[n]
                own.total[n] += delta("proj", x, slot) + delta("fc2", own.hidden[n], slot)
        return own

    @property
    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.qkv, self.hidden, self.total


def owners_of(shape: str, seed: int = 0) -> list[int]:
    num_rows, _, ranks = SHAPES[shape]
    dice = Random(f"{shape} {seed}")
    return [dice.randrange(-1, len(ranks)) for _ in range(num_rows)]


WAYS = [(shape, rows_per_tile) for shape in SHAPES for rows_per_tile in (16, 64)]
LARGE = ("the largest rank beside a small one", 16)


@devices
@sweep(("shape", "rows_per_tile"), WAYS, always=[(ODD, 16), (ODD, 64), LARGE])
def test_both_versions_are_the_formula_and_leave_rows_of_the_base_untouched(
    shape: str, rows_per_tile: int, device: str
) -> None:
    block, owners = Block.drawn(shape, device, torch.float32), owners_of(shape)
    slot_T, num_slots = torch.tensor(owners, device=device), len(SHAPES[shape][2])
    expected = block.to(torch.float64).by_rows(owners)
    without = [n for n, slot in enumerate(owners) if slot < 0]
    for ops in (plain, fast):
        got = block.adapt(ops, ops.tile_slots(slot_T, num_slots, rows_per_tile))
        for mine, true in zip(got.results, expected.results, strict=True):
            assert distance(mine, true) <= 2e-6 * true.norm()
        assert torch.equal(got.qkv[without], block.qkv[without])
        assert torch.equal(got.total[without], block.total[without])


@devices
@pytest.mark.parametrize("rows_per_tile", [16, 64])
@sweep("shape", [ODD, "the largest rank beside a small one", "several tiles of one adapter"], always=[ODD])
def test_the_deltas_of_one_matrix_alone_are_the_formula(shape: str, rows_per_tile: int, device: str) -> None:
    block, owners = Block.drawn(shape, device, torch.float32), owners_of(shape)
    slot_T, num_slots = torch.tensor(owners, device=device), len(SHAPES[shape][2])
    for ops in (plain, fast):
        tiles, own = ops.tile_slots(slot_T, num_slots, rows_per_tile), block.to(torch.float32)
        ops.add_deltas(tiles, own.total, own.mixed, own.factors["proj"], own.y, own.reads_norm)
        ops.add_deltas(tiles, own.qkv, own.y, own.factors["qkv"])
        ops.add_deltas(tiles, own.hidden, own.y, own.factors["fc1"], has_gelu=True)
        for n, slot in enumerate(owners):
            x = block.y[n] if slot >= 0 and block.reads_norm[slot] else block.mixed[n]
            for name, source, got, was in (
                ("proj", x, own.total, block.total),
                ("qkv", block.y[n], own.qkv, block.qkv),
                ("fc1", block.y[n], own.hidden, block.hidden),
            ):
                if slot < 0:
                    assert torch.equal(got[n], was[n])
                    continue
                a, b, rank = block.factors[name]
                a, b = a[slot, : int(rank[slot])].double(), b[slot, : int(rank[slot])].double().T
                true = was[n].double() + b @ (a @ source.double())
                if name == "fc1":
                    true = functional.gelu(true, approximate="tanh")
                assert distance(got[n], true) <= 4e-6 * true.norm()


@dataclass
class Layer:
    """A linear layer of the base model, what it reads, and a delta of it."""

    weight: Tensor
    bias: Tensor | None
    x: Tensor
    other: Tensor | None
    name: str
    has_gelu: bool

    def through(self, ops: object, block: Block, tiles: SlotTiles, owners: Tensor, **more: TuningTable) -> Tensor:
        reads_other = None if self.other is None else block.reads_norm
        return ops.small_adapted_linear(  # type: ignore[attr-defined]
            tiles, self.x, self.weight, self.bias, block.factors[self.name], self.other, reads_other,
            owners < 0 if self.has_gelu else None, **more,
        )  # fmt: skip

    def of_base(self, table: TuningTable) -> Tensor:
        return small_linear(self.x, self.weight, self.bias, None, self.has_gelu, table=table)

    def exactly(self, block: Block, owners: list[int]) -> Tensor:
        """The formula, row by row."""
        out = []
        for n, slot in enumerate(owners):
            y = self.weight.double() @ self.x[n].double() + (0.0 if self.bias is None else self.bias.double())
            if slot >= 0:
                a, b, rank = block.factors[self.name]
                x = self.other[n] if self.other is not None and block.reads_norm[slot] else self.x[n]
                r = int(rank[slot])
                y += b[slot, :r].double().T @ (a[slot, :r].double() @ x.double())
            out.append(functional.gelu(y, approximate="tanh") if self.has_gelu else y)
        return torch.stack(out)


def layers_of(block: Block, device: str, dtype: torch.dtype) -> list[Layer]:
    draw = Draw(device, dtype)
    dim, qkv_dim, ff_dim = (part.shape[1] for part in (block.y, block.qkv, block.hidden))

    def weight(num_out: int, num_in: int) -> Tensor:
        return draw(num_out, num_in, scale=0.1)

    return [
        Layer(weight(qkv_dim, dim), draw(qkv_dim), block.y, None, "qkv", has_gelu=False),
        Layer(weight(ff_dim, dim), draw(ff_dim), block.y, None, "fc1", has_gelu=True),
        Layer(weight(dim, dim), None, block.mixed, block.y, "proj", has_gelu=False),
        Layer(weight(dim, ff_dim), draw(dim), block.hidden, None, "fc2", has_gelu=False),
    ]


HANDFULS = ["one row", "all adapters and the base", "the largest rank beside a small one", "more slots than rows"]


ODD_DIMS, EVEN_DIMS = (DIM, QKV, FF), (128, 384, 256)
"""What no block divides, and what those of both tables below do."""
LARGE_BLOCKS = TuningTable(
    {
        TunedSize("small_linear", 16, (num_out, num_in), (torch.float32,) * 2): LinearTuning(64, 32, num_stages=2)
        for num_out, num_in in ((384, 128), (256, 128), (128, 128), (128, 256))
    }
)
"""Larger than ranks."""


@devices
@pytest.mark.parametrize(("dims", "table"), [(ODD_DIMS, NO_TABLE), (EVEN_DIMS, NO_TABLE), (EVEN_DIMS, LARGE_BLOCKS)])
@sweep("shape", HANDFULS, always=[*HANDFULS[:3]])
def test_a_layer_of_a_handful_of_rows_with_its_deltas_is_the_formula_and_keeps_the_bits_of_the_base(
    shape: str, dims: tuple[int, int, int], table: TuningTable, device: str
) -> None:
    block, owners = Block.drawn(shape, device, torch.float32, dims), owners_of(shape)
    slot_T, num_slots = torch.tensor(owners, device=device), len(SHAPES[shape][2])
    without = [n for n, slot in enumerate(owners) if slot < 0]
    for a, b, rank in block.factors.values():
        for slot, r in enumerate(rank.tolist()[:-1]):
            a[slot, r:] = b[slot, r:] = torch.nan
    for layer in layers_of(block, device, torch.float32):
        expected = layer.exactly(block, owners)
        plainly = layer.through(plain, block, plain.tile_slots(slot_T, num_slots), slot_T)
        got = layer.through(fast, block, fast.tile_slots(slot_T, num_slots), slot_T, table=table)
        assert distance(plainly, expected) <= 3e-6 * expected.norm(), layer.name
        assert distance(got, expected) <= 3e-6 * expected.norm(), layer.name
        assert torch.equal(got[without], layer.of_base(table)[without]), layer.name


@devices
def test_a_layer_with_its_deltas_in_half_precision_is_no_further_from_the_truth_than_the_plain_version(
    device: str,
) -> None:
    shape = "all adapters and the base"
    block, owners = Block.drawn(shape, device, HALF[device]), owners_of(shape)
    slot_T, num_slots = torch.tensor(owners, device=device), len(SHAPES[shape][2])
    for layer in layers_of(block, device, HALF[device]):
        exact = layer.exactly(block, owners)
        plainly, got = (layer.through(o, block, o.tile_slots(slot_T, num_slots), slot_T) for o in (plain, fast))
        assert distance(got, exact) <= 1.05 * distance(plainly, exact), layer.name


@devices
def test_half_precision_is_no_further_from_the_truth_than_the_plain_version(device: str) -> None:
    shape = "several tiles of one adapter"
    block = Block.drawn(shape, device, HALF[device])
    slot_T = torch.zeros(len(block.y), dtype=torch.int64, device=device)
    exact = block.to(torch.float64).by_rows([0] * len(block.y))
    rounded, got = (block.adapt(ops, ops.tile_slots(slot_T, 1)) for ops in (plain, fast))
    for mine, plainly, true in zip(got.results, rounded.results, exact.results, strict=True):
        assert distance(mine, true) <= 1.05 * distance(plainly, true)


@devices
@sweep(("columns", "rows_per_tile"), [(64, 16), (128, 64), (512, 16)], always=[(64, 16)])
def test_however_columns_are_split_the_sum_is_the_same_up_to_rounding(
    columns: int, rows_per_tile: int, device: str
) -> None:
    block, owners = Block.drawn(ODD, device, torch.float32), owners_of(ODD)
    tiles, f = fast.tile_slots(torch.tensor(owners, device=device), 4, rows_per_tile), block.factors
    tuning = Tuning(16, 64, columns, block_out=32, sum_block_out=16, expand_ranks=16)
    got = block.to(torch.float32)
    fast.add_input_deltas(tiles, got.y, got.qkv, f["qkv"], got.hidden, f["fc1"], tuning=tuning)
    fast.add_output_deltas(
        tiles, got.total, got.mixed, got.y, got.reads_norm, f["proj"], got.hidden, f["fc2"], tuning=tuning
    )
    for mine, true in zip(got.results, block.to(torch.float64).by_rows(owners).results, strict=True):
        assert distance(mine, true) <= 2e-6 * true.norm()


@devices
@pytest.mark.parametrize("ops", [plain, fast])
@pytest.mark.parametrize("rows_per_tile", [16, 64])
@pytest.mark.parametrize("num_rows", [0, 1, 16, 17, 200])
def test_every_row_is_in_exactly_one_tile_of_its_slot(
    num_rows: int, rows_per_tile: int, ops: object, device: str
) -> None:
    slots = [Random(f"{num_rows} {n}").randrange(-1, 5) for n in range(num_rows)]
    tiles = ops.tile_slots(torch.tensor(slots, dtype=torch.int64, device=device), 5, rows_per_tile)  # type: ignore[attr-defined]
    found = [
        (row, slot)
        for slot, rows in zip(tiles.slot_K.tolist(), tiles.rows_KN.tolist(), strict=True)
        for row in rows
        if slot >= 0 and row >= 0
    ]
    assert sorted(found) == [(row, 5 if slot < 0 else slot) for row, slot in enumerate(slots)]


@devices
def test_a_slot_filled_with_another_rank_is_read_anew_and_never_beyond_its_rank(device: str) -> None:
    block, owners = Block.drawn(ODD, device, torch.float32), owners_of(ODD)
    tiles = fast.tile_slots(torch.tensor(owners, device=device), 4)
    block.adapt(fast, tiles)
    for a, b, rank in block.factors.values():
        rank.copy_(torch.tensor([16, 0, 32, 48, 0], device=device))
        for slot, r in enumerate(rank.tolist()[:-1]):
            a[slot, r:] = b[slot, r:] = torch.nan
    got = block.adapt(fast, tiles)
    for mine, true in zip(got.results, block.to(torch.float64).by_rows(owners).results, strict=True):
        assert distance(mine, true) <= 2e-6 * true.norm()
