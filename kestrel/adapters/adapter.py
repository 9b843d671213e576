"""A low-rank adapter, its id and its shape: for each adapted matrix W a pair (a, b), so that y = W·x + scale · b·(a·x).

In a layer of experts the feed-forward pairs have a leading expert dimension. A token visits `experts_per_token` of
them, so each expert holds that fraction of the rank and the token sees the whole rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from torch import Tensor

from kestrel.errors import RequestError, shown

Side = Literal["a", "b"]
AdapterFormat = Literal["torch-variant", "hosted-finetune", "peft", "kestrel-adapter"]
ProjInput = Literal["attention", "block_norm"]

SIDES: tuple[Side, ...] = get_args(Side)
PROJ_INPUTS: tuple[ProjInput, ...] = get_args(ProjInput)


class AdapterTarget(NamedTuple):
    """One adapted matrix of the text model."""

    layer: int
    matrix: str


@dataclass(frozen=True, slots=True, eq=False)
class LowRankPair:
    """The two factors of one delta; with experts both have a leading expert dimension."""

    a: Tensor
    """[rank, in] or [experts, rank / experts_per_token, in]"""
    b: Tensor
    """[out, rank] or [experts, out, rank / experts_per_token]"""


@dataclass(frozen=True, eq=False)
class Adapter:
    """A checked adapter. Its tensors are on the CPU, own their memory and have the type of the file."""

    format: AdapterFormat
    """The kind of file it was read from, or is meant for."""
    rank: int
    targets: Mapping[AdapterTarget, LowRankPair]
    alpha: float | None = None
    """Deltas are scaled by alpha / rank; without it they are added as they are."""
    proj_input: ProjInput = "attention"
    """What the delta of `proj` reads: the attention output, or (torch variants) the block's LayerNorm output."""
    base_model: str | None = None
    """Name of the model it was trained on, where the file says so."""
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def scale(self) -> float:
        return 1.0 if self.alpha is None else self.alpha / self.rank


@dataclass(frozen=True)
class AdaptedMatrix:
    """A matrix that adapters may name."""

    rows: int
    columns: int
    place: str
    """The matrix of the model's layers that it is, or is a part of: parts lie one above the other."""
    first_row: int = 0


@dataclass(frozen=True)
class ExpertShape:
    """The layers of experts of a base model: all from `start_layer` on."""

    start_layer: int
    num_experts: int
    experts_per_token: int
    matrices: Mapping[str, AdaptedMatrix]
    """Those that each expert has, by name."""


@dataclass(frozen=True)
class AdapterShape:
    """The sizes of a base model's text layers, as far as an adapter must fit them."""

    num_layers: int
    matrices: Mapping[str, AdaptedMatrix]
    """Of a dense layer, by name."""
    moe: ExpertShape | None = None
    is_parallel: bool = False
    """Attention and MLP read the same norm, so that a delta of `proj` may read it too (`Adapter.proj_input`)."""

    @property
    def places(self) -> Mapping[str, tuple[str, ...]]:
        """The matrices of the model's layers, and by which names adapters know them or their parts."""
        names: dict[str, tuple[str, ...]] = {}
        for name, matrix in self.matrices.items():
            names[matrix.place] = (*names.get(matrix.place, ()), name)
        return names

    @property
    def num_dense_layers(self) -> int:
        return self.num_layers if self.moe is None else min(self.moe.start_layer, self.num_layers)

    def experts_of(self, target: AdapterTarget) -> ExpertShape | None:
        """The experts behind a target, None where it is a single matrix."""
        is_sparse = self.moe is not None and target.layer >= self.num_dense_layers
        return self.moe if is_sparse and self.moe is not None and target.matrix in self.moe.matrices else None

    def tensor_shape(self, target: AdapterTarget, side: Side, rank: int) -> tuple[int, ...]:
        """What one factor must measure at a rank (the rank of the whole adapter, not of one expert)."""
        experts = self.experts_of(target)
        matrix = (self if experts is None else experts).matrices[target.matrix]
        rows, columns = matrix.rows, matrix.columns
        own_rank = rank if experts is None else rank // experts.experts_per_token
        factor = (own_rank, columns) if side == "a" else (rows, own_rank)
        return factor if experts is None else (experts.num_experts, *factor)

    def place_shape(self, layer: int, place: str, side: Side, rank: int) -> tuple[int, ...]:
        """The same for one of the model's own matrices, which holds the factors of its parts at this rank each."""
        names = self.places[place]
        first = AdapterTarget(layer, names[0])
        if self.experts_of(first) is not None:
            return self.tensor_shape(first, side, rank)
        if side == "a":
            return rank * len(names), self.matrices[names[0]].columns
        return sum(self.matrices[name].rows for name in names), rank * len(names)


MAX_NAME_LENGTH = 64
MAX_STEP_DIGITS = 12

_FORM = re.compile(rf"([A-Za-z0-9_-]{{1,{MAX_NAME_LENGTH}}})(?:@([0-9]{{1,{MAX_STEP_DIGITS}}}))?")


@dataclass(frozen=True, slots=True)
class AdapterId:
    """`{finetune_id}@{step}`, or a plain name. It comes from strangers: only a short, plain form is an id, and none
    ever touches a path."""

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
                "adapter",
                f"{shown(text)} is not an adapter id; write finetune_id@step or a name (up to {MAX_NAME_LENGTH} "
                f"letters A-Z a-z, digits, - and _; the step is a number of up to {MAX_STEP_DIGITS} digits)",
            )
        return cls(found[1], found[2])

    @classmethod
    def try_parse(cls, text: str) -> AdapterId | None:
        found = _FORM.fullmatch(text)
        return None if found is None else cls(found[1], found[2])
