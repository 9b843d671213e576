from __future__ import annotations

from typing import Any

import pytest

from kestrel.errors import RequestError
from kestrel.settings import SETTINGS, SamplingParams, boolean, text
from kestrel.skills import default_registry
from kestrel.skills.base import ModelProfile
from kestrel.skills.builtin import spatial_refs
from kestrel.skills.fields import FieldTable, random_seed

TABLE = FieldTable("query", {"question": text, "reasoning": boolean, "spatial_refs": spatial_refs})
OBJECTS = FieldTable("point", {"object": text}, bound="max_objects", other_names={"max_points": "max_objects"})

GOOD: list[tuple[str, Any, Any]] = [
    ("max_tokens", 1, 1),
    ("max_tokens", 2.0, 2),
    ("max_new_tokens", 5, 5),
    ("temperature", 0, 0.0),
    ("temperature", 1.5, 1.5),
    ("top_p", 1, 1.0),
    ("top_k", 0, 0),
    ("min_p", 0.25, 0.25),
    ("seed", 2**63 - 1, 2**63 - 1),
    ("seed", -1e18, -(10**18)),
    ("logprobs", 0, 0),
    ("adapter", "01J5@1000", "01J5@1000"),
    ("variant", "01J5@1000", "01J5@1000"),
    ("allowed_ids", [3, 4], (3, 4)),
    ("suppressed_ids", (), ()),
    ("presence_penalty", -2, -2.0),
    ("frequency_penalty", 2, 2.0),
    ("repetition_penalty", 1.25, 1.25),
    ("logit_bias", {"7": 100, 5: -0.5}, ((5, -0.5), (7, 100.0))),
    ("logit_bias", {}, ()),
    ("min_tokens", 0, 0),
    ("ignore_eos", True, True),
    ("stop_token_ids", [7, 8.0], (7, 8)),
    ("stop", "\n\n", ("\n\n",)),
    ("stop", [" ", "猫"], (" ", "猫")),
    ("stop", [], ()),
]
BAD: list[tuple[str, Any]] = [
    ("max_tokens", 0),
    ("max_tokens", 2.5),
    ("max_tokens", True),
    ("max_new_tokens", -1),
    ("temperature", "0.5"),
    ("temperature", -0.1),
    ("temperature", 2.01),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", 10**400),
    ("temperature", False),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 1.1),
    ("min_p", [0.1]),
    ("seed", -(2**63) - 1),
    ("seed", float(-(2**63) - 1)),
    ("seed", 2**63),
    ("logprobs", 65),
    ("logprobs", True),
    ("adapter", ""),
    ("adapter", 7),
    ("allowed_ids", []),
    ("allowed_ids", 5),
    ("allowed_ids", [1, "2"]),
    ("suppressed_ids", [-1]),
    ("suppressed_ids", [True]),
    ("presence_penalty", 2.01),
    ("presence_penalty", "1"),
    ("frequency_penalty", -2.5),
    ("frequency_penalty", float("nan")),
    ("repetition_penalty", 2.1),
    ("repetition_penalty", -1),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e-40),
    ("logit_bias", [5, 1.0]),
    ("logit_bias", {"five": 1.0}),
    ("logit_bias", {"-5": 1.0}),
    ("logit_bias", {"٥": 1.0}),
    ("logit_bias", {"99999999999": 1.0}),
    ("logit_bias", {True: 1.0}),
    ("logit_bias", {5: 1.0, "5": 2.0}),
    ("logit_bias", {5: 100.5}),
    ("logit_bias", {5: None}),
    ("logit_bias", {5: float("nan")}),
    ("logit_bias", dict.fromkeys(range(301), 1.0)),
    ("min_tokens", -1),
    ("min_tokens", float("inf")),
    ("ignore_eos", 1),
    ("stop_token_ids", 7),
    ("stop_token_ids", ["7"]),
    ("stop_token_ids", list(range(65))),
    ("stop", ""),
    ("stop", 5),
    ("stop", ["a", ""]),
    ("stop", ["a", 5]),
    ("stop", ["a"] * 17),
    ("stop", ["x" * 900] * 5),
    ("stop", "x" * 1001),
    ("stop", "\ud83d"),
    ("question", ""),
    ("question", "  \n"),
    ("question", 5),
    ("question", ["what?"]),
    ("question", "\ud83d"),
    ("reasoning", 1),
    ("reasoning", "true"),
    ("settings", [("temperature", 1)]),
]


def canonical(name: str) -> str:
    found = TABLE.canonical_setting(name)
    assert found is not None
    return found


@pytest.mark.parametrize(("name", "given", "expected"), GOOD)
def test_a_setting_is_read_in_both_places(name: str, given: Any, expected: Any) -> None:
    beside = TABLE.read({name: given}).settings
    inside = TABLE.read({"settings": {name: given}}).settings
    assert beside == inside == {canonical(name): expected}
    assert type(beside[canonical(name)]) is type(expected)


@pytest.mark.parametrize(("name", "given"), BAD)
def test_a_bad_value_is_refused_by_name(name: str, given: Any) -> None:
    with pytest.raises(RequestError) as caught:
        TABLE.read({name: given})
    assert caught.value.field == name


@pytest.mark.parametrize(("name", "given"), [case for case in BAD if case[0] in SETTINGS])
def test_a_bad_value_inside_settings_is_refused_by_name(name: str, given: Any) -> None:
    with pytest.raises(RequestError) as caught:
        TABLE.read({"settings": {name: given}})
    assert caught.value.field == name


def test_none_means_not_given() -> None:
    everything = dict.fromkeys(("question", "image", "settings", *TABLE.setting_names()))
    values = TABLE.read(everything)
    assert (values.own, values.settings, values.images) == ({}, {}, ())
    assert TABLE.read({"settings": {"temperature": None}}).settings == {}


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.5, "settings": {"temperature": 0.6}},
        {"max_tokens": 5, "max_new_tokens": 6},
        {"settings": {"max_tokens": 5, "max_new_tokens": 6}},
        {"adapter": "a@1", "settings": {"variant": "b@1"}},
    ],
)
def test_a_contradiction_is_refused_with_both_values(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"is given twice with different values .* give it once"):
        TABLE.read(fields)


def test_the_same_value_twice_is_no_contradiction() -> None:
    values = TABLE.read({"temperature": 1, "max_new_tokens": 4, "settings": {"temperature": 1.0, "max_tokens": 4}})
    assert values.settings == {"temperature": 1.0, "max_tokens": 4}


def test_an_unknown_field_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        RequestError, match=r"known fields: adapter, allowed_ids, frequency_penalty, .*image, .*question"
    ) as caught:
        TABLE.read({"temprature": 0.5})
    assert caught.value.field == "temprature"


@pytest.mark.parametrize(
    ("given", "suggested"),
    [
        ({"tempreature": 1}, "did you mean 'temperature'?"),
        ({"settings": {"max_token": 1}}, "did you mean 'max_tokens'?"),
        ({"zebra": 1}, None),
    ],
)
def test_a_name_close_to_a_known_one_gets_a_suggestion(given: dict[str, Any], suggested: str | None) -> None:
    with pytest.raises(RequestError) as refusal:
        TABLE.read(given)
    assert ("did you mean" in str(refusal.value)) is (suggested is not None)
    assert (suggested or "") in str(refusal.value)


def test_an_unknown_field_is_refused_even_without_a_value() -> None:
    with pytest.raises(RequestError, match="temprature"):
        TABLE.read({"temprature": None})


def test_an_unknown_setting_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RequestError, match=r"known settings: adapter, .*temperature") as caught:
        TABLE.read({"settings": {"temprature": 0.5}})
    assert caught.value.field == "settings.temprature"


def test_a_skills_own_field_is_no_setting() -> None:
    with pytest.raises(RequestError, match=r"settings\.question"):
        TABLE.read({"settings": {"question": "why?"}})


@pytest.mark.parametrize("name", ["max_tokens", "max_new_tokens"])
def test_a_token_bound_on_objects_is_refused_with_the_remedy(name: str) -> None:
    with pytest.raises(RequestError, match="use max_objects") as caught:
        OBJECTS.read({name: 5})
    assert caught.value.field == name


def test_an_object_bound_on_text_is_refused_with_the_remedy() -> None:
    with pytest.raises(RequestError, match=r"max_objects: .*use max_tokens"):
        TABLE.read({"settings": {"max_objects": 5}})


@pytest.mark.parametrize("given", [0, 10_001, True, 2.5])
def test_max_objects_has_a_range(given: Any) -> None:
    with pytest.raises(RequestError, match=r"max_points: must be an integer from 1 to 10000"):
        OBJECTS.read({"max_points": given})


def test_a_huge_value_does_not_fill_the_message() -> None:
    with pytest.raises(RequestError) as caught:
        TABLE.read({"temperature": "x" * 10**6})
    assert len(str(caught.value)) < 300


def sampled(settings: dict[str, Any], temperature: float = 0.5) -> SamplingParams:
    values = TABLE.read({"settings": settings})
    return values.sampling(temperature=temperature, top_p=0.9, max_new_tokens=768, draw_seed=lambda: 42)


def test_defaults_fill_what_is_not_given() -> None:
    assert sampled({}) == SamplingParams(768, 0.5, 0.9, seed=42)


def test_given_values_win_over_defaults() -> None:
    given = {"max_tokens": 9, "temperature": 0.7, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 8, "logprobs": 2}
    ids = {"allowed_ids": [1, 2], "suppressed_ids": [3]}
    assert sampled(given | ids) == SamplingParams(9, 0.7, 0.5, 3, 0.1, 8, 2, (1, 2), (3,))


def test_every_setting_reaches_the_sampling() -> None:
    given = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5, "logit_bias": {"3": 4}}
    endings = {"min_tokens": 2, "ignore_eos": True, "stop_token_ids": [9], "stop": "x"}
    assert sampled(given | endings) == SamplingParams(
        768,
        0.5,
        0.9,
        seed=42,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias=((3, 4.0),),
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=(9,),
        stop=("x",),
    )


def test_bounds_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(RequestError, match=r"min_tokens: must not exceed max_tokens \(5\)"):
        sampled({"min_tokens": 6, "max_tokens": 5})
    assert sampled({"min_tokens": 5, "max_tokens": 5}).min_tokens == 5
    with pytest.raises(RequestError, match=r"repetition_penalty: must be a number from 0\.01 to 2"):
        sampled({"repetition_penalty": 0})


WORDS_ONLY: dict[str, Any] = {
    "presence_penalty": 1,
    "frequency_penalty": 1,
    "repetition_penalty": 1.5,
    "logit_bias": {5: 1},
    "min_tokens": 1,
    "ignore_eos": True,
    "stop_token_ids": [5],
    "stop": "x",
}


@pytest.mark.parametrize("skill", ["point", "detect", "segment"])
@pytest.mark.parametrize("name", WORDS_ONLY)
def test_skills_without_words_refuse_settings_of_words(skill: str, name: str, md3: ModelProfile) -> None:
    fields = {"object": "cat", "image": object()}
    with pytest.raises(RequestError, match=f"does not apply to {skill}; leave it out") as caught:
        default_registry().get(skill).parse(fields | {name: WORDS_ONLY[name]}, md3)
    assert caught.value.field == name


@pytest.mark.parametrize("skill", ["query", "caption", "chat", "complete"])
def test_skills_of_words_take_them_all(skill: str, md3: ModelProfile) -> None:
    fields: dict[str, dict[str, Any]] = {
        "query": {"question": "why?"},
        "caption": {"image": object()},
        "chat": {"messages": [{"role": "user", "content": "why?"}]},
        "complete": {"prompt": "why"},
    }
    request = default_registry().get(skill).parse(fields[skill] | {"settings": WORDS_ONLY}, md3)
    assert request.sampling.stop == ("x",)
    assert request.sampling.logit_bias == ((5, 1.0),)


def test_no_seed_is_drawn_without_chance() -> None:
    assert sampled({"temperature": 0}).seed == 0
    assert sampled({}, temperature=0.0).seed == 0
    assert sampled({"seed": 0, "temperature": 1}).seed == 0


def test_drawn_seeds_differ_and_are_valid() -> None:
    seeds = {SamplingParams(seed=random_seed()).seed for _ in range(20)}
    assert len(seeds) == 20


GOOD_REFS: list[tuple[Any, tuple]] = [
    ([], ()),
    ([[0, 1]], ((0.0, 1.0),)),
    (((0.25, 0.5), [0, 0, 1, 1]), ((0.25, 0.5), (0.0, 0.0, 1.0, 1.0))),
    ([[0.5, 0.5, 0.5, 0.5]], ((0.5, 0.5, 0.5, 0.5),)),
]
BAD_REFS: list[tuple[Any, str]] = [
    ("0.5,0.5", "spatial_refs"),
    ({"x": 0.5}, "spatial_refs"),
    ([0.5, 0.5], "spatial_refs[0]"),
    ([[0.5]], "spatial_refs[0]"),
    ([[0.1, 0.2, 0.3]], "spatial_refs[0]"),
    ([[0.1, 0.2], [0.1, 1.2]], "spatial_refs[1]"),
    ([[0.1, -0.2]], "spatial_refs[0]"),
    ([[0.1, float("nan")]], "spatial_refs[0]"),
    ([[0.1, True]], "spatial_refs[0]"),
    ([[0.1, "0.2"]], "spatial_refs[0]"),
    ([[0.6, 0.1, 0.5, 0.2]], "spatial_refs[0]"),
    ([[0.1, 0.3, 0.5, 0.2]], "spatial_refs[0]"),
]


@pytest.mark.parametrize(("given", "expected"), GOOD_REFS)
def test_spatial_references_are_read(given: Any, expected: tuple) -> None:
    assert TABLE.read({"spatial_refs": given}).own["spatial_refs"] == expected


@pytest.mark.parametrize(("given", "field"), BAD_REFS)
def test_a_bad_spatial_reference_is_refused_by_index(given: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        TABLE.read({"spatial_refs": given})
    assert caught.value.field == field
