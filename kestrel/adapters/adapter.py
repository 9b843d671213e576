"""A low-rank adapter, its id and its shape: for each adapted matrix W a pair (a, b), so that y = W·x + scale · b·(a·x).

In a layer of experts the feed-forward pairs have a leading expert dimension. Each expert holds the whole rank, or the
experts that a token visits share it (`ExpertShape`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from kestrel.errors import RequestError, shown

if TYPE_CHECKING:
    from torch import Tensor

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
    """[rank, in] or [experts, `ExpertShape.rank`, in]"""
    b: Tensor
    """[out, rank] or [experts, out, `ExpertShape.rank`]"""


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
class ExpertShape:
    """Of a matrix that each expert of a layer has."""

    num_experts: int
    sharing: int = 1
    """How many experts share the rank of an adapter: those of a token, or 1 where each holds all of it."""
    joined: int = 1
    """How many matrices lie one above the other in this one, each with a rank of its own."""

    def rank(self, rank: int) -> int:
        """What each expert holds of an adapter's rank."""
        return -(-rank * self.joined // self.sharing)


@dataclass(frozen=True)
class AdaptedMatrix:
    """A matrix that adapters may name."""

    rows: int
    columns: int
    place: str
    """The matrix of the model's layers that it is, or is a part of: parts lie one above the other."""
    first_row: int = 0
    experts: ExpertShape | None = None
    """None of a single matrix; an expert's has no parts."""

    def rank(self, rank: int) -> int:
        return rank if self.experts is None else self.experts.rank(rank)


@dataclass(frozen=True)
class AdapterShape:
    """The sizes of a base model's text layers, as far as an adapter must fit them."""

    layers: tuple[Mapping[str, AdaptedMatrix], ...]
    """The matrices of each layer, by name."""
    is_parallel: bool = False
    """Attention and MLP read the same norm, so that a delta of `proj` may read it too (`Adapter.proj_input`)."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def targets(self) -> list[AdapterTarget]:
        return [AdapterTarget(layer, name) for layer, matrices in enumerate(self.layers) for name in matrices]

    @property
    def num_dense_layers(self) -> int:
        """Before the first layer of experts."""
        return min((target.layer for target in self.targets if self.experts_of(target)), default=self.num_layers)

    @property
    def num_experts(self) -> int | None:
        """Of its layers of experts."""
        return next((experts.num_experts for target in self.targets if (experts := self.experts_of(target))), None)

    def places(self, layer: int) -> Mapping[str, tuple[str, ...]]:
        """The matrices of a layer of the model, and by which names adapters know them or their parts."""
        names: dict[str, tuple[str, ...]] = {}
        for name, matrix in self.layers[layer].items():
            names[matrix.place] = (*names.get(matrix.place, ()), name)
        return names

    def experts_of(self, target: AdapterTarget) -> ExpertShape | None:
        """The experts behind a target, None where it is a single matrix."""
        return self.layers[target.layer][target.matrix].experts

    def rank_step(self, targets: Iterable[AdapterTarget]) -> int:
        """What the rank of an adapter of these must be a multiple of."""
        return max((experts.sharing for target in targets if (experts := self.experts_of(target))), default=1)

    def tensor_shape(self, target: AdapterTarget, side: Side, rank: int) -> tuple[int, ...]:
        """What one factor must measure at a rank (the rank of the whole adapter, not of one expert)."""
        matrix = self.layers[target.layer][target.matrix]
        factor = (matrix.rank(rank), matrix.columns) if side == "a" else (matrix.rows, matrix.rank(rank))
        return factor if matrix.experts is None else (matrix.experts.num_experts, *factor)

    def place_shape(self, layer: int, place: str, side: Side, rank: int) -> tuple[int, ...]:
        """The same for one of the model's own matrices, which holds the factors of its parts at this rank each."""
        names = self.places(layer)[place]
        if len(names) == 1:
            return self.tensor_shape(AdapterTarget(layer, names[0]), side, rank)
        parts = [self.layers[layer][name] for name in names]
        if side == "a":
            return rank * len(parts), parts[0].columns
        return sum(part.rows for part in parts), rank * len(parts)


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
