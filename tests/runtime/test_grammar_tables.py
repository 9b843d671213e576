"""The device tables move like the plain-Python grammar."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from kestrel.grammar import END, Carries, Edge, Grammar, State
from kestrel.kernels.commit_ids import advance
from kestrel.kernels.sampling import mask
from kestrel.runtime import rows
from kestrel.runtime.contract import RowStart
from kestrel.runtime.rows import GrammarTables
from kestrel.settings import SamplingParams
from tests.exhaustive import given_examples

VOCAB = 12
CPU = torch.device("cpu")
ids = st.integers(0, VOCAB - 1)


@st.composite
def grammars(draw: st.DrawFn) -> Grammar:
    size = draw(st.integers(1, 4))
    edges = st.builds(Edge, st.integers(END, size - 1), st.none() | ids)
    states = st.builds(
        State,
        name=st.just("s"),
        otherwise=edges,
        edges=st.dictionaries(ids, edges, max_size=4).map(lambda d: tuple(d.items())),
        allowed=st.none() | st.lists(ids, min_size=1, max_size=5, unique=True).map(tuple),
        suppressed=st.lists(ids, max_size=3).map(tuple),
        carries=st.sampled_from(list(Carries)),
        phase=st.integers(0, 1),
        when_spent=st.none() | ids,
    )
    return Grammar("random", tuple(draw(st.lists(states, min_size=size, max_size=size))))


@given_examples(40, 150, st.lists(grammars(), min_size=1, max_size=3), st.data())
def test_advance_equals_the_plain_machine(many: list[Grammar], data: st.DataObject) -> None:
    tables = GrammarTables(VOCAB, CPU)
    bases = [tables.base_of(grammar) for grammar in many]
    rows = [(g, s) for g in range(len(many)) for s in range(len(many[g].states))]
    sampled = [data.draw(ids) for _ in rows]
    spent = [data.draw(st.booleans()) for _ in rows]
    state_B = torch.tensor([bases[g] + s for g, s in rows])
    moved = advance(state_B, torch.tensor(sampled), torch.tensor(spent), tables.tensors)
    for b, (g, s) in enumerate(rows):
        state = many[g].states[s]
        symbol = state.when_spent if spent[b] and state.when_spent is not None else sampled[b]
        emitted, goto = many[g].advance(s, symbol)
        assert moved.emitted_B[b] == emitted
        assert bool(moved.ended_B[b]) == (goto == END)
        if goto != END:
            assert moved.state_B[b] - bases[g] == goto
            assert bool(moved.changes_phase_B[b]) == (many[g].states[goto].phase != state.phase)
        assert moved.carries_B[b] == int(state.carries)


@given_examples(30, 100, grammars())
def test_mask_leaves_exactly_what_a_state_allows(grammar: Grammar) -> None:
    tables = GrammarTables(VOCAB, CPU)
    base = tables.base_of(grammar)
    logits = torch.randn(len(grammar.states), VOCAB)
    masked = mask(logits, torch.arange(len(grammar.states)) + base, tables.tensors)
    for s, state in enumerate(grammar.states):
        for token_id in range(VOCAB):
            allowed = state.allowed is None or token_id in state.allowed
            if allowed and token_id not in state.suppressed:
                assert masked[s, token_id] == logits[s, token_id]
            else:
                assert masked[s, token_id] == -torch.inf


def test_equal_grammars_share_their_rows() -> None:
    tables = GrammarTables(VOCAB, CPU)
    make = lambda: Grammar("g", (State("s", Edge(0), ((0, Edge(END)),)),))  # noqa: E731
    assert tables.base_of(make()) == tables.base_of(make()) == 0
    assert tables.base_of(Grammar("other", make().states)) == 1


def test_no_row_points_past_tables_that_became_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_KEPT_STATES", 100)
    table = rows.RowTable(2, 1, 0, VOCAB, GrammarTables(VOCAB, CPU), CPU)
    sizes = (90, 4, 4, 4)
    for number, size in enumerate(sizes):
        grammar = Grammar(f"g{number}", tuple(State("s", Edge(size - 1)) for _ in range(size)))
        table.apply_starts([RowStart(0, grammar, SamplingParams(), 9)])
        if size == sizes[0]:
            table.tensors.state[table.spare_row] = size - 1  # where its own steps lead it
    assert table.grammars.num_states == 2 * sizes[-1]
    assert (table.tensors.state < len(table.grammars.tensors.phase_N)).all()
