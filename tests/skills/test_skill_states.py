"""Results and streams of the states beyond what the goldens show."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from kestrel.request import FinishReason, TokenLogprobs
from kestrel.settings import SamplingParams
from kestrel.skills.base import ModelProfile, SkillState, ThinkingIds, ThinkingTags
from kestrel.skills.complete import CompleteState
from kestrel.skills.detect import DetectState
from kestrel.skills.point import PointState
from kestrel.skills.states import ReasoningState, TextState
from kestrel.skills.thinking import TaggedThinkingState, ThinkingState
from kestrel.tokens import CoordToken, SizeToken, TextToken, Token
from tests.places import bare

from .machine import feed

PLAIN = SamplingParams()
WITH_LOGPROBS = SamplingParams(logprobs=2)


def words(profile: ModelProfile, text: str) -> list[Token]:
    return [TextToken(token_id) for token_id in profile.tokenizer.encode(text)]


def test_an_unfinished_point_is_dropped(md2: ModelProfile) -> None:
    output, deltas = feed(PointState(md2, PLAIN, "dog"), [CoordToken(0.25), CoordToken(0.5), CoordToken(0.75)])
    point = {"x": 0.25, "y": 0.5, "label": "dog", "score": 1.0}
    assert output.fields == {"points": [point]}
    assert [(delta.kind, delta.data) for delta in deltas] == [("point", point)]


@pytest.mark.parametrize("cut", [1, 2])
def test_an_unfinished_box_is_dropped(md2: ModelProfile, cut: int) -> None:
    whole = [CoordToken(0.5), CoordToken(0.5), SizeToken(0.5, 0.25)]
    output, deltas = feed(DetectState(md2, PLAIN, "dog"), [*whole, *whole[:cut]])
    box = {"x_min": 0.25, "y_min": 0.375, "x_max": 0.75, "y_max": 0.625, "label": "dog", "score": 1.0}
    assert output.fields == {"objects": [box]}
    assert [(delta.kind, delta.data) for delta in deltas] == [("object", box)]


def test_boxes_may_leave_the_picture(md2: ModelProfile) -> None:
    output, _ = feed(DetectState(md2, PLAIN, "dog"), [CoordToken(0.0), CoordToken(1.0), SizeToken(0.5, 0.5)])
    assert bare(output.fields["objects"]) == [{"x_min": -0.25, "y_min": 0.75, "x_max": 0.25, "y_max": 1.25}]


def test_a_score_is_the_mean_likelihood_of_what_placed_the_object(md2: ModelProfile) -> None:
    tokens = [CoordToken(0.5, math.log(0.5)), CoordToken(0.5, math.log(0.9)), SizeToken(0.5, 0.25, math.log(0.8))]
    boxes, _ = feed(DetectState(md2, PLAIN, "dog"), [*tokens, *tokens[::-1][1:], tokens[2]])
    assert [box["score"] for box in boxes.fields["objects"]] == [round(0.36 ** (1 / 3), 4)] * 2
    points, _ = feed(PointState(md2, PLAIN, "dog"), tokens[:2])
    assert points.fields["points"][0]["score"] == round(0.45**0.5, 4)


def test_structured_results_are_json_as_text(md2: ModelProfile) -> None:
    output, _ = feed(PointState(md2, PLAIN, "dog"), [CoordToken(0.25), CoordToken(0.5)])
    assert output.text == '{"points":[{"x":0.25,"y":0.5,"label":"dog","score":1.0}]}'
    nothing, _ = feed(DetectState(md2, PLAIN, "dog"), [])
    assert json.loads(nothing.text) == {"objects": []}


def test_a_complete_result_has_its_ids(md2: ModelProfile) -> None:
    ids = md2.tokenizer.encode("a dog")
    output, _ = feed(CompleteState(md2, PLAIN, "text"), words(md2, "a dog"))
    assert output.fields == {"text": "a dog", "token_ids": ids}


def test_thinking_cut_short_leaves_an_empty_answer(md3: ModelProfile) -> None:
    state = ReasoningState(md3, PLAIN)
    output, deltas = feed(state, words(md3, "let me see"))
    assert output.fields == {"answer": "", "reasoning": {"text": "let me see", "grounding": []}}
    assert {delta.kind for delta in deltas} == {"reasoning"}


def test_thinking_streams_before_the_answer(md3: ModelProfile) -> None:
    tokens = [*words(md3, "look at"), TextToken(7), *words(md3, " dog"), TextToken(3), *words(md3, "two of them")]
    _, deltas = feed(ReasoningState(md3, PLAIN), tokens)
    assert [(delta.kind, delta.text) for delta in deltas] == [
        ("reasoning", "look "),
        ("reasoning", "at"),
        ("reasoning", " "),
        ("reasoning", "dog"),
        ("text", "two "),
        ("text", "of "),
        ("text", "them"),
    ]


def test_a_coordinate_may_be_the_first_thought(md3: ModelProfile) -> None:
    output, _ = feed(ReasoningState(md3, PLAIN), [CoordToken(0.25), CoordToken(0.5), *words(md3, "here"), TextToken(3)])
    assert output.fields["reasoning"]["grounding"] == [{"start_idx": 0, "end_idx": 4, "points": [[0.25, 0.5]]}]


def test_a_point_of_thinking_streams_as_soon_as_it_is_whole(md3: ModelProfile) -> None:
    places = [CoordToken(value) for value in (0.25, 0.5, 0.75, 1.0)]
    tokens = [*words(md3, "look"), TextToken(7), *words(md3, "at dogs"), *places, TextToken(3)]
    output, deltas = feed(ReasoningState(md3, PLAIN), tokens)
    streamed = [delta.data["grounding"] for delta in deltas if delta.data is not None]
    whole = {"start_idx": 4, "end_idx": 11}
    assert streamed == [{**whole, "points": [[0.25, 0.5]]}, {**whole, "points": [[0.75, 1.0]]}]
    assert output.fields["reasoning"]["grounding"] == [{**whole, "points": [[0.25, 0.5], [0.75, 1.0]]}]


def test_characters_split_by_a_mark_stay_apart(md3: ModelProfile) -> None:
    halves = md3.tokenizer.encode("é")
    assert len(halves) == 2
    tokens = [TextToken(halves[0]), TextToken(7), TextToken(halves[1]), TextToken(3)]
    output, deltas = feed(ReasoningState(md3, PLAIN), tokens)
    assert output.fields["reasoning"]["text"] == "\ufffd\ufffd"
    assert "".join(delta.text for delta in deltas) == "\ufffd\ufffd"


def test_finishing_without_a_flush_loses_nothing(md3: ModelProfile) -> None:
    for state in (TextState(md3, PLAIN, "caption"), ReasoningState(md3, PLAIN)):
        for token in [TextToken(3), *words(md3, "held back")]:
            state.consume(token, None)
        assert state.finish(FinishReason.LENGTH).text == "held back"


def logprob_entries(state: SkillState, tokens: list, logprobs: list) -> list:
    for token, entry in zip(tokens, logprobs, strict=True):
        state.consume(token, entry)
    return state.finish(FinishReason.STOP).fields["logprobs"]


def test_logprobs_are_shown_when_asked_for(md2: ModelProfile) -> None:
    dog, cat = md2.tokenizer.encode(" dog")[0], md2.tokenizer.encode(" cat")[0]
    given = TokenLogprobs(-0.5, ((dog, -0.5), (cat, -1.5)))
    entries = logprob_entries(TextState(md2, WITH_LOGPROBS, "answer"), [TextToken(dog)], [given])
    shown_dog = {"id": dog, "token": " dog", "bytes": [32, 100, 111, 103], "logprob": -0.5}
    shown_cat = {"id": cat, "token": " cat", "bytes": [32, 99, 97, 116], "logprob": -1.5}
    assert entries == [{**shown_dog, "kind": "text", "offset": 0, "top": [shown_dog, shown_cat]}]


def test_the_chosen_token_is_always_listed(md2: ModelProfile) -> None:
    dog, cat = md2.tokenizer.encode(" dog")[0], md2.tokenizer.encode(" cat")[0]
    given = [TokenLogprobs(-2.5, ((cat, -0.5),)), TokenLogprobs(-2.5), TokenLogprobs(-0.5, ((dog, -0.5), (cat, -1.0)))]
    entries = logprob_entries(TextState(md2, WITH_LOGPROBS, "answer"), [TextToken(dog)] * 3, given)
    tops = [[(one["id"], one["logprob"]) for one in entry["top"]] for entry in entries]
    assert tops == [[(cat, -0.5), (dog, -2.5)], [(dog, -2.5)], [(dog, -0.5), (cat, -1.0)]]


def streamed(state: SkillState, tokens: list) -> tuple[list, list]:
    """(deltas, entries of the result); the n-th token has log-probability −n. Ends when the state says so."""
    deltas = []
    for n, token in enumerate(tokens):
        deltas.append(state.consume(token, TokenLogprobs(-float(n))))
        if deltas[-1] is not None and deltas[-1].ends:
            break
    deltas.append(state.flush())
    entries = state.finish(FinishReason.STOP).fields["logprobs"]
    return [delta for delta in deltas if delta is not None], entries


@pytest.mark.parametrize("text", ["look at two dogs", "né 猫 🙂🙂 x", "\n\nlines\n"])
def test_streamed_logprobs_add_up_and_belong_to_their_text(md2: ModelProfile, text: str) -> None:
    tokens = words(md2, text)
    deltas, entries = streamed(TextState(md2, WITH_LOGPROBS, "answer"), tokens)
    assert [entry for delta in deltas for entry in delta.logprobs] == entries
    assert bytes(octet for entry in entries for octet in entry["bytes"]) == text.encode()
    assert [entry["logprob"] for entry in entries] == [-float(n) for n in range(len(tokens))]
    printed = 0
    for delta in deltas:
        assert all(printed <= entry["offset"] < printed + len(delta.text) for entry in delta.logprobs)
        printed += len(delta.text)


def test_offsets_say_where_each_token_begins(md2: ModelProfile) -> None:
    text = "né 猫 dog"
    _, entries = streamed(TextState(md2, WITH_LOGPROBS, "answer"), words(md2, text))
    consumed = b""
    for entry in entries:
        assert entry["offset"] == len(consumed.decode(errors="ignore"))
        consumed += bytes(entry["bytes"])


def test_logprobs_of_what_a_stop_string_cut_are_not_shown(md2: ModelProfile) -> None:
    sampling = SamplingParams(logprobs=0, stop=("STOP",))
    deltas, entries = streamed(TextState(md2, sampling, "answer"), words(md2, "two dogs STOP here"))
    assert "".join(delta.text for delta in deltas) == "two dogs "
    assert [entry for delta in deltas for entry in delta.logprobs] == entries
    assert bytes(octet for entry in entries for octet in entry["bytes"]).startswith(b"two dogs ")
    assert all(entry["offset"] < len("two dogs ") for entry in entries)


def test_thinking_and_answer_have_their_own_logprobs(md3: ModelProfile) -> None:
    thinking, answer = words(md3, "look at"), words(md3, "two of them")
    tokens = [*thinking, CoordToken(0.5), TextToken(3), *answer]
    deltas, entries = streamed(ReasoningState(md3, WITH_LOGPROBS), tokens)
    assert [entry["kind"] for entry in entries] == [
        *["reasoning"] * len(thinking),
        None,
        None,
        *["text"] * len(answer),
    ]
    for kind, text in (("reasoning", b"look at"), ("text", b"two of them")):
        shown = [entry for delta in deltas if delta.kind == kind for entry in delta.logprobs]
        assert bytes(octet for entry in shown for octet in entry["bytes"]) == text


def test_ids_without_text_are_streamed_where_they_stand(md3: ModelProfile) -> None:
    mark = TextToken(md3.regions.end_ground)
    deltas, entries = streamed(ReasoningState(md3, WITH_LOGPROBS), [*words(md3, "look"), mark, TextToken(3)])
    assert [entry["id"] for delta in deltas for entry in delta.logprobs] == [e["id"] for e in entries if e["kind"]]
    state = TextState(md3, SamplingParams(logprobs=0, stop=("STOP",)), "answer")
    deltas, entries = streamed(state, [*words(md3, "two "), mark, *words(md3, "STOP")])
    assert [entry for delta in deltas for entry in delta.logprobs] == entries
    assert entries[-1]["id"] == mark.id


def test_stop_strings_end_the_answer_but_not_the_thinking(md3: ModelProfile) -> None:
    state = ReasoningState(md3, SamplingParams(stop=("two",)))
    tokens = [*words(md3, "two or two"), TextToken(3), *words(md3, "it is two of them")]
    deltas = [delta for token in tokens if (delta := state.consume(token, None)) is not None]
    assert not any(delta.ends for delta in deltas if delta.kind == "reasoning")
    assert deltas[-1].ends
    fields = state.finish(FinishReason.STOP).fields
    assert (fields["reasoning"]["text"], fields["answer"]) == ("two or two", "it is ")


def test_typed_tokens_have_their_ids_in_logprobs(md2: ModelProfile) -> None:
    tokens = [CoordToken(0.5), CoordToken(0.5), SizeToken(0.5, 0.5)]
    logprobs = [TokenLogprobs(-1.0), None, TokenLogprobs(-2.0)]
    entries = logprob_entries(DetectState(md2, WITH_LOGPROBS, "dog"), tokens, logprobs)
    assert [(entry["id"], entry["logprob"]) for entry in entries] == [(5, -1.0), (5, None), (6, -2.0)]


def test_logprobs_are_absent_unless_asked_for(md2: ModelProfile) -> None:
    state = TextState(md2, PLAIN, "answer")
    state.consume(TextToken(40), TokenLogprobs(-1.0))
    assert "logprobs" not in state.finish(FinishReason.STOP).fields


# ---------------------------------------------------------------------- thoughts between two ids

MARKS = ThinkingIds(opens=7, closes=3)
OPENS, CLOSES = TextToken(MARKS.opens), TextToken(MARKS.closes)


def thinking(profile: ModelProfile, sampling: SamplingParams = PLAIN, *, is_thinking: bool = False) -> ThinkingState:
    return ThinkingState(profile, sampling, MARKS, is_thinking=is_thinking)


def test_a_thought_and_the_line_breaks_behind_its_ids_are_no_part_of_the_answer(md3: ModelProfile) -> None:
    tokens = [OPENS, *words(md3, "\n"), *words(md3, "let me see"), CLOSES, *words(md3, "\n\n"), *words(md3, "two of\n")]
    output, deltas = feed(thinking(md3), tokens)
    assert output.fields == {"answer": "two of\n", "reasoning": {"text": "let me see", "grounding": []}}
    assert "".join(delta.text for delta in deltas if delta.kind == "reasoning") == "let me see"
    assert "".join(delta.text for delta in deltas if delta.kind == "text") == "two of\n"
    assert output.num_reasoning_tokens == len(tokens) - len(words(md3, "two of\n")) - len(words(md3, "\n\n"))


def test_an_answer_without_a_thought_is_an_answer(md3: ModelProfile) -> None:
    output, deltas = feed(thinking(md3), words(md3, "\ntwo of them"))
    assert output.fields == {"answer": "\ntwo of them"}
    assert {delta.kind for delta in deltas} == {"text"}
    assert output.num_reasoning_tokens == 0


def test_a_thought_that_the_prompt_opened_ends_with_its_id(md3: ModelProfile) -> None:
    output, _ = feed(thinking(md3, is_thinking=True), [*words(md3, "so"), CLOSES, *words(md3, "two")])
    assert output.fields == {"answer": "two", "reasoning": {"text": "so", "grounding": []}}
    cut, _ = feed(thinking(md3, is_thinking=True), words(md3, "so"))
    assert cut.fields == {"answer": "", "reasoning": {"text": "so", "grounding": []}}


def test_ids_of_thoughts_in_other_places_change_nothing(md3: ModelProfile) -> None:
    tokens = [*words(md3, "two"), OPENS, *words(md3, " of"), CLOSES, *words(md3, " them")]
    output, _ = feed(thinking(md3), tokens)
    assert output.fields["answer"] == md3.tokenizer.decode(
        [token.id for token in tokens if isinstance(token, TextToken)]
    )
    assert "reasoning" not in output.fields


def test_stop_strings_end_answers_and_not_thoughts(md3: ModelProfile) -> None:
    tokens = [OPENS, *words(md3, "me see"), CLOSES, *words(md3, "let me see")]
    output, _ = feed(thinking(md3, SamplingParams(stop=(" see",))), tokens)
    assert output.fields == {"answer": "let me", "reasoning": {"text": "me see", "grounding": []}}


TAGS = ThinkingTags("<think>", "</think>")


def tagged(
    profile: ModelProfile, text: str, sampling: SamplingParams = PLAIN, *, is_thinking: bool = False
) -> tuple[dict[str, Any], str, str, int]:
    """Fields of the result, both kinds of streamed text, and the tokens of the thought."""
    output, deltas = feed(TaggedThinkingState(profile, sampling, TAGS, is_thinking=is_thinking), words(profile, text))
    streamed = ["".join(delta.text for delta in deltas if delta.kind == kind) for kind in ("reasoning", "text")]
    return output.fields, streamed[0], streamed[1], output.num_reasoning_tokens


@pytest.mark.parametrize("sampling", [PLAIN, WITH_LOGPROBS])
@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("<think>\nlet me see</think>\n\ntwo of", "let me see", "two of"),
        ("\n<think>let</think>two", "let", "two"),
        ("<think></think>two", "", "two"),
        ("<think>let me </thin see", "let me </thin see", ""),
        ("<thin two", None, "<thin two"),
        ("<thi", None, "<thi"),
        ("\n two <think> of</think>", None, "\n two <think> of</think>"),
        ("", None, ""),
    ],
)
def test_thoughts_between_tags_stand_apart_too(
    md3: ModelProfile, text: str, thought: str | None, answer: str, sampling: SamplingParams
) -> None:
    fields, streamed_thought, streamed_answer, num_thinking = tagged(md3, text, sampling)
    assert (fields["answer"], streamed_answer) == (answer, answer)
    assert fields.get("reasoning", {}).get("text") == thought
    assert streamed_thought == (thought or "")
    assert (num_thinking > 0) == (thought is not None)


def test_a_tagged_thought_may_have_been_opened_by_the_prompt(md3: ModelProfile) -> None:
    fields, *_ = tagged(md3, "let me</think>two see of", SamplingParams(stop=(" see",)), is_thinking=True)
    assert fields == {"answer": "two", "reasoning": {"text": "let me", "grounding": []}}
