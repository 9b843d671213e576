from __future__ import annotations

from dataclasses import replace

import pytest

from kestrel.grammar import END, Carries, Grammar
from kestrel.request import FinishReason
from kestrel.settings import SamplingParams
from kestrel.skills.base import ModelProfile, Template
from kestrel.skills.decode_rules import (
    answer_rules,
    detect_rules,
    point_rules,
    reasoning_rules,
    segment_rules,
    text_rules,
)
from kestrel.skills.states import ReasoningState
from kestrel.tokens import CoordToken, SizeToken, TextToken

from .machine import Decoder, feed, in_order

EOS, ANSWER, COORD, SIZE = 0, 3, 5, 6


def walk(grammar: Grammar, sampled: list[int]) -> list[int]:
    """The state after each sampled id."""
    states, state = [], 0
    for token_id in sampled:
        state = grammar.advance(state, token_id)[1]
        states.append(state)
    return states


def emitted(grammar: Grammar, sampled: list[int]) -> list[int]:
    ids, state = [], 0
    for token_id in sampled:
        token, state = grammar.advance(state, token_id)
        if state == END:
            break
        ids.append(token)
    return ids


def test_an_answer_bars_the_answer_id_only_after_its_first_token(md2: ModelProfile) -> None:
    first, later = answer_rules(md2).states
    assert (first.suppressed, later.suppressed) == ((), (ANSWER,))
    assert walk(answer_rules(md2), [40, 41, EOS]) == [1, 1, END]
    assert walk(answer_rules(md2), [EOS]) == [END]


def test_coordinates_are_plain_text_in_answers(md2: ModelProfile) -> None:
    assert answer_rules(md2).carries == text_rules(md2).carries == Carries.NOTHING


def test_raw_text_bars_nothing(md2: ModelProfile) -> None:
    (state,) = text_rules(md2).states
    assert (state.suppressed, state.allowed, walk(text_rules(md2), [ANSWER, EOS])) == ((), None, [0, END])


def test_grammars_are_shared_between_requests(md2: ModelProfile, md3: ModelProfile) -> None:
    for rules in (answer_rules, reasoning_rules, point_rules, detect_rules, segment_rules, text_rules):
        assert rules(md2) is rules(replace(md2, name="copy"))
    assert point_rules(md2) != point_rules(md3)


def test_thinking_bars_end_and_size_only_after_its_first_token(md3: ModelProfile) -> None:
    first, later = reasoning_rules(md3).states[:2]
    assert (first.suppressed, later.suppressed) == ((), (EOS, SIZE))
    assert first.carries == later.carries == Carries.COORD


def test_the_end_id_does_not_end_thinking(md3: ModelProfile) -> None:
    assert walk(reasoning_rules(md3), [EOS, 40, ANSWER, 41, EOS]) == [1, 1, 2, 3, END]


def test_the_answer_after_thinking_starts_afresh(md3: ModelProfile) -> None:
    first, later = reasoning_rules(md3).states[2:]
    assert (first.suppressed, later.suppressed) == ((), (ANSWER,))
    assert (first.phase, later.phase) == (1, 1)
    assert first.carries == later.carries == Carries.NOTHING


def test_the_answer_id_becomes_the_query_suffix(md3: ModelProfile) -> None:
    other = replace(md3, answer_id=59)
    assert emitted(reasoning_rules(other), [40, 59, 41, EOS]) == [40, 3, 41]
    assert emitted(reasoning_rules(other), [40, 3, 41, EOS]) == [40, 3, 41]
    assert walk(reasoning_rules(other), [40, 3])[-1] == 2


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
@pytest.mark.parametrize("suffix", [(3,), (30, 31, 32)])
def test_thinking_and_answer_have_a_budget_each(md3: ModelProfile, max_tokens: int, suffix: tuple[int, ...]) -> None:
    templates = {**md3.templates, "query": Template((1,), suffix)}
    profile = replace(md3, templates=templates)
    sampling = SamplingParams(max_new_tokens=max_tokens)
    decoder = Decoder(profile.regions, reasoning_rules(profile), sampling)
    thought, answer = md3.tokenizer.encode("z")[0], md3.tokenizer.encode("y")[0]
    tokens = list(decoder.run(lambda state, step: (state.allowed or (answer if state.phase else thought,))[0]))
    expected = [thought] * max_tokens + list(suffix) + [answer] * max_tokens
    assert tokens == [TextToken(i) for i in expected]
    assert decoder.reason is FinishReason.LENGTH
    output, _ = feed(ReasoningState(profile, sampling), tokens)
    assert output.fields["answer"] == "y" * max_tokens
    assert output.fields["reasoning"]["text"] == "z" * max_tokens


def test_reasoning_without_a_suffix_is_a_broken_profile(md3: ModelProfile) -> None:
    with pytest.raises(ValueError, match="no suffix"):
        reasoning_rules(replace(md3, templates={"query": Template((1,))}))


def test_anything_but_the_end_is_a_first_object(md2: ModelProfile, md3: ModelProfile) -> None:
    for profile in (md2, md3):
        for rules in (point_rules, detect_rules):
            assert rules(profile).states[0].allowed is None
            assert rules(profile).advance(0, 40) == (COORD, 1)
            assert walk(rules(profile), [EOS]) == [END]


def test_md2_takes_anything_but_the_end_as_the_next_object(md2: ModelProfile) -> None:
    assert emitted(point_rules(md2), [40, COORD, 41, COORD, EOS]) == [COORD] * 4
    assert emitted(detect_rules(md2), [40, COORD, SIZE, 41, COORD, SIZE, EOS]) == [COORD, COORD, SIZE] * 2


def test_md3_lets_only_coordinate_and_end_compete(md3: ModelProfile) -> None:
    assert point_rules(md3).states[2].allowed == (COORD, EOS)
    assert detect_rules(md3).states[3].allowed == (COORD, EOS)
    assert walk(point_rules(md3), [40, COORD, COORD, COORD, EOS]) == [1, 2, 1, 2, END]
    assert walk(detect_rules(md3), [40, COORD, SIZE, COORD, COORD, SIZE, EOS]) == [1, 2, 3, 1, 2, 3, END]


def test_y_and_size_are_forced(md2: ModelProfile) -> None:
    _, y, size = detect_rules(md2).states
    assert (y.allowed, size.allowed) == ((COORD,), (SIZE,))
    assert (y.carries, size.carries) == (Carries.COORD, Carries.SIZE)


def test_segment_types_coordinates_and_sizes_among_text(md3: ModelProfile) -> None:
    decoder = Decoder(
        md3.regions, segment_rules(md3), SamplingParams(), coords=iter((0.25, 0.5)), sizes=iter([(0.125, 0.75)])
    )
    tokens = list(decoder.run(in_order([COORD, COORD, SIZE, 40, EOS])))
    assert tokens == [CoordToken(0.25), CoordToken(0.5), SizeToken(0.125, 0.75), TextToken(40)]
    assert decoder.reason is FinishReason.STOP
