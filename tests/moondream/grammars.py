"""The decode rules of each skill for a Moondream config, as the naive loops apply them."""

from __future__ import annotations

from kestrel.grammar import END, Carries, Edge, Grammar, State, free_text
from kestrel.moondream.config import MoondreamConfig


def text_grammar(config: MoondreamConfig) -> Grammar:
    ids = config.tokenizer
    return free_text(ids.eos_id, suppressed_after_first=(ids.answer_id,))


def reasoning_grammar(config: MoondreamConfig) -> Grammar:
    """Thinking with grounded points until the answer id, then the query suffix, then an answer."""
    ids = config.tokenizer
    (suffix_id,) = ids.templates["query"].suffix
    open_answer = ((ids.answer_id, Edge(2, emit=suffix_id)),)
    stop = ((ids.eos_id, Edge(END)),)
    thinking = {"carries": Carries.COORD, "when_spent": ids.answer_id}
    return Grammar(
        "reasoning",
        (
            State("think first", Edge(1), open_answer, **thinking),
            State("think", Edge(1), open_answer, suppressed=(ids.eos_id, ids.size_id), **thinking),
            State("answer first", Edge(3), stop, phase=1),
            State("answer", Edge(3), stop, suppressed=(ids.answer_id,), phase=1),
        ),
    )


def objects_grammar(config: MoondreamConfig, *, with_size: bool) -> Grammar:
    """x, y (and a size) per object. Any id but the end opens the first; the model's habit decides about the next."""
    ids = config.tokenizer
    stop = ((ids.eos_id, Edge(END)),)
    one_more = Edge(1, emit=ids.coord_id)
    next_allowed = (ids.coord_id, ids.eos_id) if config.generation.compares_coord_and_eos_only else None
    states = [
        State("first", one_more, stop, carries=Carries.COORD),
        State("y", Edge(3 if with_size else 2), allowed=(ids.coord_id,), carries=Carries.COORD),
        State("next", one_more, stop, allowed=next_allowed, carries=Carries.COORD),
    ]
    if with_size:
        states.append(State("size", Edge(2), allowed=(ids.size_id,), carries=Carries.SIZE))
    return Grammar("detect" if with_size else "point", tuple(states))
