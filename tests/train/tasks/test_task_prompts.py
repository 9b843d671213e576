from __future__ import annotations

from dataclasses import replace

import pytest

from kestrel.errors import RequestError
from kestrel.moondream.config import MOONDREAM3, MoondreamConfig, derived_generation
from kestrel.moondream.prompts import moondream_profile
from kestrel.tokens import CoordToken, ImageSpan, SizeToken, TextToken
from kestrel.train.tasks.example import Apart, SpecialToken, TaskEncoder, TaskExample, direct, encode
from kestrel.train.tasks.mix import SAMPLERS
from kestrel.train.tiny import tokenizer_config

from .driving import examples_of
from .made_scenes import profile, registry, task_format


def _text(text: str) -> tuple[TextToken, ...]:
    return tuple(TextToken(token_id) for token_id in profile().tokenizer.encode(text))


def _loaded_config() -> MoondreamConfig:
    tokenizer = tokenizer_config(task_format().tokenizer_json)
    return replace(MOONDREAM3, tokenizer=tokenizer, generation=derived_generation(MOONDREAM3.text, tokenizer))


@pytest.mark.parametrize("family", SAMPLERS)
def test_prompt_is_what_the_loaded_model_would_be_sent_without_the_picture(family: str) -> None:
    loaded = moondream_profile(_loaded_config(), profile().tokenizer, "loaded")
    seen = 0
    for _, example in examples_of(family, 40, draws=1):
        skill = registry().get(example.skill)
        images = {"image": b"bytes"} if example.sees_image else {}
        spans = [ImageSpan("digest", 729)] * len(images)
        sent = skill.prompt(skill.parse({**example.fields, **images}, loaded), spans, loaded).items
        encoded = encode(example, profile(), registry())
        if example.sees_image:
            assert sent[0] == ImageSpan("digest", 730, bos_id=0)
            assert sent[1:] == encoded.prompt_items
        else:
            assert sent == encoded.prompt_items
            assert sent[0] == TextToken(0)
        seen += 1
    assert seen >= 3


def test_target_keeps_pieces_in_order_and_ends_with_the_end_id() -> None:
    target = ("I see", SpecialToken("start_ground"), " cat", CoordToken(0.25), SpecialToken("end_ground"), ".")
    example = TaskExample("any", "query", {"question": "Why?", "reasoning": True}, (*target, SpecialToken("answer")))
    encoded = encode(example, profile(), registry())
    expected = (*_text("I see"), TextToken(7), *_text(" cat"), CoordToken(0.25), TextToken(9), *_text("."))
    assert encoded.target_items == (*expected, TextToken(3), TextToken(0))


def test_pieces_apart_are_not_tokenised_together() -> None:
    example = direct("any", "What?", Apart(("c", "a", "t")))
    assert encode(example, profile(), registry()).target_items == (*_text("c"), *_text("a"), *_text("t"), TextToken(0))
    assert len(_text("cat")) == 1


def test_boxes_and_points_stand_between_template_and_question() -> None:
    example = direct("any", "What?", "cat", refs=((0.5, 0.25), (0.0, 0.2, 0.5, 0.6)))
    refs = (CoordToken(0.5), CoordToken(0.25), CoordToken(0.25), CoordToken(0.4))
    template = profile().templates["query"]
    prompt = encode(example, profile(), registry()).prompt_items
    before, after = len(template.prefix), len(template.prefix) + len(refs)
    assert prompt[:before] == tuple(map(TextToken, template.prefix))
    assert prompt[before:after] == refs
    size = prompt[after]
    assert isinstance(size, SizeToken)
    assert (size.width, size.height) == pytest.approx((0.5, 0.4))
    assert prompt[after + 1 :] == (*_text("What?"), TextToken(3))


def test_one_encoder_gives_the_same_as_encoding_each_alone() -> None:
    encoder = TaskEncoder(profile(), registry())
    for family in SAMPLERS:
        for _, example in examples_of(family, 6):
            assert encoder.encode(example) == encode(example, profile(), registry())


def test_a_field_the_skill_does_not_know_is_refused() -> None:
    with pytest.raises(RequestError, match="colour"):
        encode(TaskExample("any", "point", {"object": "cat", "colour": "red"}, ()), profile(), registry())
