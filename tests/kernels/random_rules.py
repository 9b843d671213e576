"""Random rows, grammars and wishes about ends, as the sampling kernels take them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kestrel.kernels.row_tables import END_STATE, NO_ID, EndingTensors, GrammarTensors, RegionHeads, RowState


@dataclass
class Rules:
    rows: RowState
    grammar: GrammarTensors
    endings: EndingTensors
    region: RegionHeads

    def copy(self) -> Rules:
        return copy.deepcopy(self)


class RandomRules:
    def __init__(self, vocab: int, device: str, seed: int = 0) -> None:
        self.vocab, self._device = vocab, device
        self._dice = torch.Generator().manual_seed(seed)

    def make(self, num_rows: int, num_entries: int, num_states: int = 12, width: int = 5) -> Rules:
        """Few ids and small numbers, so that lists overlap, edges hit and budgets run out."""
        states, width_of_stops = num_states, 3
        edge_id = self._id_lists(states, width, NO_ID)
        grammar = GrammarTensors(
            vocab_size=self.vocab,
            allowed_NA=self._id_lists(states, 2 * width, self.vocab, least=1),
            suppressed_NS=self._id_lists(states, width, self.vocab),
            end_ids_NF=self._id_lists(states, width - 1, self.vocab),
            is_limited_N=self.below(2, states),
            phase_N=self.below(2, states),
            carries_N=self.below(4, states),
            when_spent_N=self._sometimes(self.below(self.vocab, states), NO_ID),
            edge_id_NE=edge_id,
            edge_goto=self._sometimes(self.below(states, states, width + 1), END_STATE),
            edge_emit=self._sometimes(self.below(self.vocab, states, width + 1), NO_ID),
        )
        endings = EndingTensors(
            self.below(5, num_rows), self.below(5, num_rows), self._id_lists(num_rows, width_of_stops, self.vocab)
        )
        values = torch.rand(num_entries, 5, generator=self._dice).to(self._device)
        region = RegionHeads(self.vocab // 2, self.vocab // 3, values[:, :2].contiguous(), values[:, 2:].contiguous())
        return Rules(self._rows(num_rows, states), grammar, endings, region)

    def below(self, high: int, *size: int) -> Tensor:
        return torch.randint(high, size, generator=self._dice).to(self._device)

    def logits(self, num_entries: int) -> Tensor:
        """Few different numbers: there are always ties."""
        return (self.below(7, num_entries, self.vocab) - 3).float()

    def _rows(self, num_rows: int, num_states: int) -> RowState:
        small = [self.below(5, num_rows) for _ in range(4)]
        return RowState(
            last_id=self.below(self.vocab, num_rows),
            last_kind=self.below(3, num_rows),
            last_value=torch.rand(num_rows, 2, generator=self._dice).to(self._device),
            state=self.below(num_states, num_rows),
            spent=small[0],
            generated=small[1],
            budget=small[2] + 1,
            max_total=small[3] + 2,
        )

    def _id_lists(self, count: int, width: int, padding: int, least: int = 0) -> Tensor:
        """Different ids, padded at the end."""
        lists = torch.full((count, width), padding, dtype=torch.int64)
        for one in lists:
            length = int(torch.randint(least, min(width, self.vocab) + 1, (), generator=self._dice))
            one[:length] = torch.randperm(self.vocab, generator=self._dice)[:length]
        return lists.to(self._device)

    def _sometimes(self, numbers: Tensor, other: int) -> Tensor:
        return torch.where(self.below(3, *numbers.shape) == 0, other, numbers)


def columns(rows: RowState) -> Sequence[Tensor]:
    return (
        rows.last_id, rows.last_kind, rows.last_value, rows.state, rows.spent, rows.generated, rows.budget,
        rows.max_total,
    )  # fmt: skip
