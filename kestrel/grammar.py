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

from dataclasses import dataclass
from enum import IntFlag

END = -1


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

    def __post_init__(self) -> None:
        for state in self.states:
            for edge in (state.otherwise, *(edge for _, edge in state.edges)):
                if not END <= edge.goto < len(self.states):
                    raise ValueError(f"grammar {self.name}: state {state.name} goes to unknown state {edge.goto}")
            if state.allowed is not None and not state.allowed:
                raise ValueError(f"grammar {self.name}: state {state.name} allows no token at all")

    @property
    def carries(self) -> Carries:
        """What any state of this grammar can attach to a token."""
        union = Carries.NOTHING
        for state in self.states:
            union |= state.carries
        return union

    def advance(self, state: int, sampled_id: int) -> tuple[int, int]:
        """(emitted id, next state) after sampling `sampled_id` in `state`."""
        edge = self.states[state].edge(sampled_id)
        return (sampled_id if edge.emit is None else edge.emit), edge.goto


def free_text(eos_id: int, *, name: str = "text", suppressed_after_first: tuple[int, ...] = ()) -> Grammar:
    """Any text until `eos_id`; some ids are forbidden from the second token on."""
    if not suppressed_after_first:
        return Grammar(name, (State("text", Edge(0), ((eos_id, Edge(END)),)),))
    stop = ((eos_id, Edge(END)),)
    first = State("first", Edge(1), stop)
    return Grammar(name, (first, State("text", Edge(1), stop, suppressed=suppressed_after_first)))
