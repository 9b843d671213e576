"""Decode rules as data: a small Mealy machine per skill variant.

In each state some ids may be sampled. A sampled id takes the edge of that id (or `otherwise`), which says the state to
go to and, optionally, another id to emit in place of the sampled one. The emitted id is what enters the context. In a
state that `carries` coordinates (or sizes), emitting the model's coordinate (size) id attaches a value read from the
region head on the same hidden state. Going to END finishes the sequence; the id that led there is not emitted.

States belong to phases. `max_new_tokens` bounds each phase: when a phase is spent, a state with `when_spent` takes that
id's edge whatever was sampled; without it the sequence finishes with "length".

The machine is advanced on the device, inside the sampling step. `Grammar.advance` is its plain-Python twin.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntFlag
from functools import reduce
from operator import or_

END = -1
MAX_STATES = 512
MAX_IDS = 1024
"""Ids that one state may list; the tables on the device are as wide as the longest list."""


class Carries(IntFlag):
    NOTHING = 0
    COORD = 1
    SIZE = 2


@dataclass(frozen=True, slots=True)
class Edge:
    goto: int
    emit: int | None = None  # None: emit the sampled id


@dataclass(frozen=True, slots=True)
class State:
    name: str
    otherwise: Edge
    edges: tuple[tuple[int, Edge], ...] = ()
    allowed: tuple[int, ...] | None = None  # None: every id
    suppressed: tuple[int, ...] = ()
    carries: Carries = Carries.NOTHING
    phase: int = 0
    when_spent: int | None = None

    @property
    def all_edges(self) -> tuple[Edge, ...]:
        return (self.otherwise, *(edge for _, edge in self.edges))

    @property
    def ids(self) -> Iterator[int]:
        """Every id the state names."""
        yield from (token_id for token_id, _ in self.edges)
        yield from self.allowed or ()
        yield from self.suppressed
        yield from (edge.emit for edge in self.all_edges if edge.emit is not None)
        if self.when_spent is not None:
            yield self.when_spent

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids whose own edge finishes the sequence."""
        return tuple(token_id for token_id, edge in self.edges if edge.goto == END)

    def edge(self, sampled_id: int) -> Edge:
        for token_id, edge in self.edges:
            if token_id == sampled_id:
                return edge
        return self.otherwise


@dataclass(frozen=True, slots=True)
class Grammar:
    """`states[0]` is the start."""

    name: str
    states: tuple[State, ...]
    largest_id: int = field(init=False, repr=False, compare=False)
    carries: Carries = field(init=False, repr=False, compare=False)
    """What any state of this grammar can attach to a token."""
    end_ids: frozenset[int] = field(init=False, repr=False, compare=False)
    """Ids that finish the sequence in some state."""

    def __post_init__(self) -> None:
        if not isinstance(self.states, tuple) or not 0 < len(self.states) <= MAX_STATES:
            raise ValueError(f"grammar {self.name}: states must be a tuple of 1 to {MAX_STATES} states")
        for state in self.states:
            for fault in self._faults(state):
                raise ValueError(f"grammar {self.name}: state {state.name} {fault}")
        ids = (token_id for state in self.states for token_id in state.ids)
        object.__setattr__(self, "largest_id", max(ids, default=0))
        object.__setattr__(self, "carries", reduce(or_, (state.carries for state in self.states)))
        object.__setattr__(self, "end_ids", frozenset(one for state in self.states for one in state.end_ids))

    def _faults(self, state: State) -> Iterator[str]:
        for edge in state.all_edges:
            if not END <= edge.goto < len(self.states):
                yield f"goes to unknown state {edge.goto}"
        for name, ids in (("edges", state.edges), ("allowed", state.allowed), ("suppressed", state.suppressed)):
            if ids is not None and not isinstance(ids, tuple):
                yield f"has {name} that are no tuple"
            if ids is not None and len(ids) > MAX_IDS:
                yield f"has {len(ids)} {name}; at most {MAX_IDS} are possible"
        if state.allowed is not None and not state.allowed:
            yield "allows no token at all"
        for token_id in state.ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                yield f"names {token_id!r}, which is no token id"

    def advance(self, state: int, sampled_id: int) -> tuple[int, int]:
        """(emitted id, next state) after sampling `sampled_id` in `state`."""
        edge = self.states[state].edge(sampled_id)
        return (sampled_id if edge.emit is None else edge.emit), edge.goto


def ends(stop_ids: Iterable[int]) -> tuple[tuple[int, Edge], ...]:
    """Edges of a state that each of these ids finishes."""
    return tuple((token_id, Edge(END)) for token_id in stop_ids)


def free_text(*stop_ids: int, name: str = "text", suppressed_after_first: tuple[int, ...] = ()) -> Grammar:
    """Any text until one of `stop_ids`; some ids are forbidden from the second token on."""
    stop = ends(stop_ids)
    if not suppressed_after_first:
        return Grammar(name, (State("text", Edge(0), stop),))
    first = State("first", Edge(1), stop)
    return Grammar(name, (first, State("text", Edge(1), stop, suppressed=suppressed_after_first)))
