"""What each built-in skill accepts, refuses and defaults to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kestrel.errors import RequestError
from kestrel.skills import default_registry
from kestrel.skills.base import ModelProfile, SkillSpec
from kestrel.tokens import CoordToken, ImageSpan, SizeToken, Text, TextToken

IMAGE = b"picture"
SPAN = ImageSpan("digest", 729)
OPENED_SPAN = ImageSpan("digest", 730, bos_id=0)
REGISTRY = default_registry(draw_seed=lambda: 77)
MINIMAL: dict[str, dict[str, Any]] = {
    "query": {"question": "what?"},
    "caption": {"image": IMAGE},
    "point": {"image": IMAGE, "object": "dog"},
    "detect": {"image": IMAGE, "object": "dog"},
    "segment": {"image": IMAGE, "object": "dog"},
    "chat": {"messages": [{"role": "user", "content": "what?"}]},
    "complete": {"prompt": "once"},
    "embed": {"text": "once"},
}


def parse(skill: str, fields: dict[str, Any], profile: ModelProfile) -> Any:
    return REGISTRY.get(skill).parse(fields, profile)


def refused(skill: str, fields: dict[str, Any], profile: ModelProfile) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(skill, fields, profile)
    return caught.value


def laid_out(skill: str, fields: dict[str, Any], profile: ModelProfile) -> Any:
    spec: SkillSpec[Any] = REGISTRY.get(skill)
    request = spec.parse(fields, profile)
    return spec.prompt(request, [replace(SPAN, digest=str(i)) for i, _ in enumerate(request.images)], profile)


def test_the_registry_holds_every_skill() -> None:
    assert set(REGISTRY) == set(MINIMAL)


@pytest.mark.parametrize("skill", MINIMAL)
def test_minimal_fields_suffice(skill: str, md3: ModelProfile) -> None:
    prompt = laid_out(skill, MINIMAL[skill], md3)
    assert prompt.items


@pytest.mark.parametrize("skill", ["query", "caption", "chat", "complete"])
def test_text_skills_default_to_the_models_sampling(skill: str, md2: ModelProfile) -> None:
    sampling = parse(skill, MINIMAL[skill], md2).sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens, sampling.seed) == (0.5, 0.3, 768, 77)


@pytest.mark.parametrize(("skill", "max_tokens"), [("point", 300), ("detect", 450), ("segment", 768)])
def test_structured_skills_default_to_greedy(skill: str, max_tokens: int, md3: ModelProfile) -> None:
    sampling = parse(skill, MINIMAL[skill], md3).sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens, sampling.seed) == (0.0, 1.0, max_tokens, 0)


@pytest.mark.parametrize("skill", ["point", "detect", "segment"])
def test_structured_skills_honour_a_temperature(skill: str, md3: ModelProfile) -> None:
    sampling = parse(skill, {**MINIMAL[skill], "temperature": 0.7}, md3).sampling
    assert (sampling.temperature, sampling.seed) == (0.7, 77)


@pytest.mark.parametrize(("skill", "tokens_per_object"), [("point", 2), ("detect", 3)])
def test_max_objects_bounds_the_tokens(skill: str, tokens_per_object: int, md2: ModelProfile) -> None:
    request = parse(skill, {**MINIMAL[skill], "settings": {"max_objects": 7}}, md2)
    assert request.sampling.max_new_tokens == tokens_per_object * 7
    assert parse(skill, MINIMAL[skill], md2).sampling.max_new_tokens == tokens_per_object * 50


def test_max_points_bounds_points_only(md2: ModelProfile) -> None:
    assert parse("point", {**MINIMAL["point"], "max_points": 3}, md2).max_objects == 3
    assert refused("detect", {**MINIMAL["detect"], "max_points": 3}, md2).field == "max_points"


@pytest.mark.parametrize("skill", ["point", "detect"])
def test_a_token_bound_on_objects_is_refused(skill: str, md2: ModelProfile) -> None:
    error = refused(skill, {**MINIMAL[skill], "settings": {"max_tokens": 5}}, md2)
    assert error.field == "max_tokens"
    assert "use max_objects" in str(error)


@pytest.mark.parametrize(
    ("skill", "field"),
    [("query", "question"), ("point", "object"), ("detect", "object"), ("segment", "object"), ("chat", "messages")],
)
def test_a_missing_field_is_named(skill: str, field: str, md3: ModelProfile) -> None:
    error = refused(skill, {"image": IMAGE}, md3)
    assert error.field == field
    assert "is required" in str(error)


@pytest.mark.parametrize("skill", ["caption", "point", "detect", "segment"])
def test_a_missing_picture_is_named(skill: str, md3: ModelProfile) -> None:
    fields = {name: value for name, value in MINIMAL[skill].items() if name != "image"}
    assert refused(skill, fields, md3).field == "image"


@pytest.mark.parametrize("skill", ["query", "caption", "point", "complete", "chat"])
def test_pictures_are_refused_by_a_text_model(skill: str, md3: ModelProfile) -> None:
    error = refused(skill, {**MINIMAL[skill], "image": IMAGE}, replace(md3, has_vision=False))
    assert error.field == "image"
    assert "reads no pictures" in str(error)


def test_spatial_references_need_a_picture(md3: ModelProfile) -> None:
    fields = {"question": "what?", "spatial_refs": [[0.5, 0.5]]}
    assert refused("query", fields, md3).field == "spatial_refs"
    assert parse("query", {**fields, "image": IMAGE}, md3).spatial_refs == ((0.5, 0.5),)
    assert refused("detect", {**MINIMAL["detect"], "spatial_refs": []}, md3).field == "spatial_refs"


@pytest.mark.parametrize("skill", ["point", "segment"])
def test_spatial_references_follow_the_prefix(skill: str, md3: ModelProfile) -> None:
    fields = {**MINIMAL[skill], "spatial_refs": [[0.0, 0.5, 0.5, 1.0]]}
    items = laid_out(skill, fields, md3).items
    prefix = md3.templates[skill].prefix
    assert list(items[1 : 1 + len(prefix)]) == Text(prefix)
    assert list(items[1 + len(prefix) :][:3]) == [CoordToken(0.25), CoordToken(0.75), SizeToken(0.5, 0.5)]


def test_segment_encodes_the_object_without_a_blank(md3: ModelProfile) -> None:
    items = laid_out("segment", MINIMAL["segment"], md3).items
    words = Text(md3.tokenizer.encode("dog"))
    assert list(items[1:]) == [*Text((1, 313, 2)), *words, TextToken(3)]
    assert words != Text(md3.tokenizer.encode(" dog"))


def test_segment_is_refused_by_a_model_without_it(md2: ModelProfile) -> None:
    error = refused("segment", MINIMAL["segment"], md2)
    assert error.field == "skill"
    assert (
        "segment is not supported by tiny-md2; use one of: caption, chat, complete, detect, embed, point, query"
        in str(error)
    )


def test_caption_lengths_are_those_of_the_model(md2: ModelProfile) -> None:
    templates = {key: value for key, value in md2.templates.items() if key != "caption.long"}
    short_worded = replace(md2, templates=templates)
    assert parse("caption", {"image": IMAGE}, short_worded).length == "normal"
    error = refused("caption", {"image": IMAGE, "length": "long"}, short_worded)
    assert error.field == "length"
    assert "use one of: short, normal" in str(error)
    assert refused("caption", {"image": IMAGE}, replace(md2, templates={})).field == "skill"


def test_reasoning_follows_the_model_unless_asked(md2: ModelProfile, md3: ModelProfile) -> None:
    fields = {"question": "what?"}
    assert parse("query", fields, md3).reasoning
    assert not parse("query", {**fields, "reasoning": False}, md3).reasoning
    assert not parse("query", fields, md2).reasoning
    assert parse("query", {**fields, "reasoning": True}, md2).reasoning


@pytest.mark.parametrize("skill", ["query", "chat"])
def test_reasoning_is_refused_by_a_model_that_cannot(skill: str, md3: ModelProfile) -> None:
    plain = replace(md3, reasoning_opener=())
    assert refused(skill, {**MINIMAL[skill], "reasoning": True}, plain).field == "reasoning"
    assert not parse(skill, MINIMAL[skill], plain).reasoning


def test_the_question_is_used_as_given(md2: ModelProfile) -> None:
    items = laid_out("query", {"question": "  what? "}, md2).items
    assert list(items[4:-2]) == Text(md2.tokenizer.encode("  what? "))


def test_special_strings_in_a_question_stay_text(md2: ModelProfile) -> None:
    items = laid_out("query", {"question": "<|endoftext|>"}, md2).items
    assert TextToken(0) not in items[1:]


@pytest.mark.parametrize("name", ["adapter", "variant"])
def test_an_adapter_is_taken_from_the_settings(name: str, md2: ModelProfile) -> None:
    assert parse("query", {"question": "what?", "settings": {name: "tune@5"}}, md2).adapter == "tune@5"


def test_id_lists_that_leave_no_choice_are_refused(md3: ModelProfile) -> None:
    for name, ids in (("allowed_ids", [30, 31]), ("suppressed_ids", [md3.regions.coord])):
        with pytest.raises(RequestError, match=f"{name}: leaves no token for the step 'y' of point") as caught:
            laid_out("point", {**MINIMAL["point"], name: ids}, md3)
        assert caught.value.field == name
    with pytest.raises(RequestError, match="allowed_ids: leaves no token for the step 'text' of answer"):
        laid_out("caption", {"image": IMAGE, "allowed_ids": [md3.answer_id]}, md3)
    laid_out("caption", {"image": IMAGE, "allowed_ids": [30, 31], "suppressed_ids": [30]}, md3)


@pytest.mark.parametrize("prompt", ["", [], 5, None, [1.5], [-1], b"once"])
def test_a_bad_raw_prompt_is_refused(prompt: Any, md2: ModelProfile) -> None:
    assert refused("complete", {"prompt": prompt}, md2).field == "prompt"


def test_a_raw_text_prompt_follows_the_beginning(md2: ModelProfile) -> None:
    words = Text(md2.tokenizer.encode("once"))
    assert list(laid_out("complete", {"prompt": "once"}, md2).items) == [TextToken(0), *words]
    pictured = laid_out("complete", {"prompt": "once", "image": IMAGE}, md2).items
    assert list(pictured) == [replace(OPENED_SPAN, digest="0"), *words]
    bare = {"prompt": "once", "add_special_tokens": False}
    assert list(laid_out("complete", bare, md2).items) == words
    assert refused("complete", {**bare, "image": IMAGE}, md2).field == "add_special_tokens"


def test_raw_ids_are_used_as_they_are(md2: ModelProfile) -> None:
    assert list(laid_out("complete", {"prompt": [40, 0, 41]}, md2).items) == Text([40, 0, 41])
    pictured = replace(OPENED_SPAN, digest="0")
    for ids in ([0, 40, 41], [40, 41]):
        items = laid_out("complete", {"prompt": ids, "image": IMAGE}, md2).items
        assert list(items) == [pictured, *Text([40, 41])]
