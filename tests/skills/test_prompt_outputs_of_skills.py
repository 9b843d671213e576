"""complete with the prompt's log-probabilities, and embed: fields, layout and results."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from kestrel.errors import NumericalError, RequestError
from kestrel.request import FinishReason, PromptOutputs, PromptReport, ScoredToken
from kestrel.skills import default_registry
from kestrel.skills.base import ModelProfile, Prompt, SkillState
from kestrel.skills.query import QuerySkill
from kestrel.tokens import ImageSpan, Text, TextToken

IMAGE = b"picture"
SPAN = ImageSpan("digest", 729)
OPENED_SPAN = ImageSpan("digest", 730, bos_id=0)
REGISTRY = default_registry(draw_seed=lambda: 77)


def begun(skill: str, profile: ModelProfile, **fields: Any) -> tuple[Prompt, SkillState]:
    spec = REGISTRY.get(skill)
    request = spec.parse(fields, profile)
    return spec.prompt(request, [SPAN] * len(request.images), profile), spec.start(request, profile)


def refused(skill: str, profile: ModelProfile, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        begun(skill, profile, **fields)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({}, None),
        ({"echo": False, "logprobs": 2}, None),
        ({"echo": True}, None),
        ({"echo": True, "logprobs": 1}, 1),
        ({"echo": True, "settings": {"logprobs": 0}}, 0),
        ({"prompt_logprobs": 5}, 5),
        ({"prompt_logprobs": 5, "echo": True, "logprobs": 2}, 5),
    ],
)
def test_complete_asks_for_its_prompt(fields: dict[str, Any], asked: int | None, md3: ModelProfile) -> None:
    prompt, _ = begun("complete", md3, prompt=[30, 31], **fields)
    assert prompt.outputs == (None if asked is None else PromptOutputs(logprobs=asked))


@pytest.mark.parametrize("name", ["max_tokens", "max_new_tokens"])
def test_no_tokens_may_be_wanted_of_a_scored_prompt_only(name: str, md3: ModelProfile) -> None:
    for given in ({name: 0}, {"settings": {name: 0}}):
        prompt, _ = begun("complete", md3, prompt=[30, 31], prompt_logprobs=1, **given)
        assert prompt.sampling.max_new_tokens == 0
        error = refused("complete", md3, prompt=[30, 31], echo=True, **given)
        assert error.field == "max_tokens"
        assert "set prompt_logprobs too" in str(error)
        assert refused("query", md3, question="what?", **given).field in (name, f"settings.{name}")


@pytest.mark.parametrize(("name", "value"), [("echo", 1), ("prompt_logprobs", 65), ("prompt_logprobs", True)])
def test_a_bad_wish_is_refused_by_name(name: str, value: Any, md3: ModelProfile) -> None:
    assert refused("complete", md3, prompt=[30, 31], **{name: value}).field == name


def test_every_prompt_token_has_an_entry_and_the_first_none(md3: ModelProfile) -> None:
    _, state = begun("complete", md3, prompt=[30, 31, 32], prompt_logprobs=1, max_tokens=0)
    scores = [ScoredToken(-0.25, 1, ((31, -0.25),)), ScoredToken(-3.0, 7, ((40, -0.5),))]
    state.consume_prompt(PromptReport([scores]))
    output = state.finish(FinishReason.LENGTH)
    fields = {**output.fields, **{name: list(entries) for name, entries in output.late.items()}}
    shown = {i: {"id": i, "token": (t := md3.tokenizer.decode([i])), "bytes": list(t.encode())} for i in (31, 32, 40)}
    assert fields["prompt_token_ids"] == [30, 31, 32]
    assert fields["prompt_logprobs"] == [
        None,
        {**shown[31], "logprob": -0.25, "rank": 1, "top": [{**shown[31], "logprob": -0.25}]},
        {
            **shown[32],
            "logprob": -3.0,
            "rank": 7,
            "top": [{**shown[40], "logprob": -0.5}, {**shown[32], "logprob": -3.0}],
        },
    ]


@pytest.mark.parametrize("prompt", [[0, 40, 41], [40, 41], "once"])
def test_the_beginning_of_text_before_a_picture_is_echoed(prompt: Any, md3: ModelProfile) -> None:
    _, state = begun("complete", md3, prompt=prompt, image=IMAGE, echo=True, prompt_logprobs=0)
    ids = [0, *(md3.tokenizer.encode("once") if prompt == "once" else [40, 41])]
    state.consume_prompt(PromptReport([[ScoredToken(-1.0, 1)] * (len(ids) - 1)]))
    output = state.finish(FinishReason.LENGTH)
    assert output.fields["prompt_token_ids"] == ids
    assert [entry and entry["id"] for entry in output.late["prompt_logprobs"]] == [None, *ids[1:]]


def test_an_echo_alone_has_the_ids_alone(md3: ModelProfile) -> None:
    _, state = begun("complete", md3, prompt=[30, 31], echo=True)
    state.consume(TextToken(32), None)
    output = state.finish(FinishReason.LENGTH)
    assert (output.fields["prompt_token_ids"], output.fields["token_ids"]) == ([30, 31], [32])
    assert "prompt_logprobs" not in {**output.fields, **output.late}


def test_embed_lays_out_picture_and_text_and_counts_from_after_the_beginning(md3: ModelProfile) -> None:
    ids = md3.tokenizer.encode("once")
    layouts = [
        ({"text": "once"}, [TextToken(0), *Text(ids)]),
        ({"token_ids": ids}, [TextToken(0), *Text(ids)]),
        ({"token_ids": [0, *ids]}, [TextToken(0), *Text(ids)]),
        ({"image": IMAGE}, [OPENED_SPAN]),
        ({"image": IMAGE, "token_ids": [0]}, [OPENED_SPAN]),
        ({"image": IMAGE, "text": "once"}, [OPENED_SPAN, *Text(ids)]),
    ]
    for fields, items in layouts:
        prompt, _ = begun("embed", md3, **fields)
        assert list(prompt.items) == items
        assert prompt.outputs == PromptOutputs(pool_from=1)
        assert prompt.sampling.max_new_tokens == 0


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "text"),
        ({"text": " "}, "text"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [0]}, "text"),
        ({"text": "once", "token_ids": [30]}, "token_ids"),
        ({"text": "once", "temperature": 0.5}, "temperature"),
        ({"text": "once", "settings": {"max_tokens": 5}}, "max_tokens"),
        ({"text": "once", "logprobs": 1}, "logprobs"),
        ({"text": "once", "question": "what?"}, "question"),
    ],
)
def test_embed_refuses_what_it_cannot_use(fields: dict[str, Any], field: str, md3: ModelProfile) -> None:
    assert refused("embed", md3, **fields).field == field


def test_embed_refuses_pictures_of_a_text_model(md3: ModelProfile) -> None:
    assert refused("embed", replace(md3, has_vision=False), image=IMAGE).field == "image"


def test_an_embedding_is_the_direction_of_the_mean(md3: ModelProfile) -> None:
    _, state = begun("embed", md3, text="once")
    state.consume_prompt(PromptReport([], [6.0, -8.0], 2))
    fields = state.finish(FinishReason.LENGTH).fields
    assert fields == {"embedding": pytest.approx([0.6, -0.8]), "num_tokens": 2}
    assert math.hypot(*fields["embedding"]) == pytest.approx(1.0)
    _, state = begun("embed", md3, text="once")
    state.consume_prompt(PromptReport([], [0.0, 0.0], 2))
    with pytest.raises(NumericalError, match="no direction"):
        state.finish(FinishReason.LENGTH)


def test_a_state_that_cannot_take_a_report_says_so(md3: ModelProfile) -> None:
    skill = QuerySkill()
    state = skill.start(skill.parse({"question": "what?", "reasoning": False}, md3), md3)
    with pytest.raises(NotImplementedError, match="TextState asks for outputs of the prompt but takes none"):
        state.consume_prompt(PromptReport())
