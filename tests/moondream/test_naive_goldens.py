"""Whole generations against the reference implementations, as plain loops and as grammars."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kestrel.grammar import Grammar
from kestrel.layers.attention import Step
from kestrel.moondream.config import MoondreamConfig
from kestrel.request import FinishReason
from kestrel.tokens import ContextItem, ImageSpan, Text, TextToken
from tests.exhaustive import sweep

from . import grammars
from .goldens import FAMILIES, case_naive, case_names, golden, pixels, tensors
from .naive import NaiveMoondream, Run, forced, greedy, image_digest
from .naive_generator import NO_BLOCK, DenseAttention

CASES = [(family, name) for family in FAMILIES for name in case_names(family, with_adapters=True)]
SHORT_CASES = [case for case in CASES if "multi" not in case[1]]
LOGITS_TOLERANCE = 1e-4
DETECT_LOGITS_TOLERANCE = 5e-4  # the size embedding amplifies rounding
REGION_LOGITS_TOLERANCE = 5e-4
BOX_TOLERANCE = 2e-6


def case_of(family: str, name: str) -> tuple[dict[str, Any], NaiveMoondream, np.ndarray | None]:
    case = golden(family).cases[name]
    image = None if case["image"] is None else pixels(case["image"])
    return case, case_naive(family, case), image


@cache
def run_loops(family: str, name: str) -> Run:
    case, naive, image = case_of(family, name)
    settings = case.get("settings", {})
    if "question" in case:
        return naive.query(
            image,
            case["question"],
            reasoning=case.get("reasoning", False),
            spatial_refs=case.get("spatial_refs", ()),
            max_tokens=settings.get("max_tokens", 768),
            choose=forced(case["forced_tokens"]) if "forced_tokens" in case else greedy,
        )
    assert image is not None
    if "length" in case:
        return naive.caption(image, case["length"], max_tokens=settings["max_tokens"])
    skill = naive.detect if "detect" in name else naive.point
    return skill(image, case["object"], max_objects=settings["max_objects"])


def case_prompt(case: dict[str, Any], name: str, naive: NaiveMoondream) -> tuple[list[ContextItem], Grammar, int]:
    """(items after the image, grammar, token budget) of a case."""
    settings = case.get("settings", {})
    if "question" in case:
        reasoning = case.get("reasoning", False)
        grammar = (grammars.reasoning_grammar if reasoning else grammars.text_grammar)(naive.config)
        items = naive.query_items(case["question"], case.get("spatial_refs", ()), reasoning)
        return items, grammar, settings.get("max_tokens", 768)
    if "length" in case:
        prefix = naive.config.tokenizer.templates[f"caption.{case['length']}"].prefix
        return Text(prefix), grammars.text_grammar(naive.config), settings["max_tokens"]
    skill = name.removeprefix("lora_").partition("_")[0]
    grammar = grammars.objects_grammar(naive.config, with_size=skill == "detect")
    tokens_per_object = 3 if skill == "detect" else 2
    return naive.object_items(skill, case["object"]), grammar, tokens_per_object * settings["max_objects"]


def run_grammar(family: str, name: str) -> Run:
    case, naive, image = case_of(family, name)
    items, grammar, budget = case_prompt(case, name, naive)
    choose = forced(case["forced_tokens"]) if "forced_tokens" in case else greedy
    return naive.generate(*naive.context(image, items), grammar, budget, choose)


def stacked(run: Run, field: str) -> Tensor:
    return torch.stack([getattr(step, field) for step in run.steps])


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=tolerance)


@sweep(("family", "name"), CASES, always=SHORT_CASES)
def test_loops_repeat_every_step_of_the_reference(family: str, name: str) -> None:
    case, expected = golden(family).cases[name], tensors(family, "text")
    run = run_loops(family, name)
    tolerance = DETECT_LOGITS_TOLERANCE if name.startswith("detect") else LOGITS_TOLERANCE
    first = case["steps"][0]
    starts = [0] + [step["pos"] for step in case["steps"][1:]]
    assert [step.start for step in run.steps] == starts
    assert run.steps[1].start == first["pos"] + len(first["tokens"])
    assert_close(stacked(run, "logits_V"), expected[f"{name}.logits"], tolerance)
    # The residual stream is several times larger than the logits.
    assert_close(stacked(run, "hidden_D"), expected[f"{name}.hidden"], 4 * tolerance)


@sweep(("family", "name"), CASES, always=SHORT_CASES)
def test_loops_give_the_reference_output(family: str, name: str) -> None:
    case, expected = golden(family).cases[name], tensors(family, "text")
    run = run_loops(family, name)
    assert run.coord_bins == case["coord_bins"]
    assert run.size_bins == case.get("size_bins", [])
    if "objects" in case["output"]:
        for box, expected_box in zip(run.output["objects"], case["output"]["objects"], strict=True):
            assert box == pytest.approx(expected_box, rel=0.0, abs=BOX_TOLERANCE)
    else:
        assert run.output == case["output"]
    if "generated_tokens" in case:
        assert run.token_ids == case["generated_tokens"]
    if f"{name}.coord_logits_first2" in expected:
        first_two = torch.stack(run.coord_logits[:2])
        assert_close(first_two, expected[f"{name}.coord_logits_first2"], REGION_LOGITS_TOLERANCE)
    if f"{name}.size_logits_first" in expected:
        assert_close(run.size_logits[0], expected[f"{name}.size_logits_first"], REGION_LOGITS_TOLERANCE)


@sweep(("family", "name"), CASES, always=SHORT_CASES)
def test_a_grammar_takes_the_same_steps_as_the_loop(family: str, name: str) -> None:
    by_loop, by_grammar = run_loops(family, name), run_grammar(family, name)
    assert by_grammar.tokens == by_loop.tokens
    # The loop, as the reference, also feeds the last token of a spent budget.
    assert len(by_loop.steps) - len(by_grammar.steps) == (by_grammar.finish is FinishReason.LENGTH)
    for step, expected in zip(by_grammar.steps, by_loop.steps, strict=False):
        assert step.start == expected.start
        assert_close(step.logits_V, expected.logits_V, 1e-6)


@pytest.mark.parametrize("name", ["detect_multi_eos", "detect_small_eos"])
def test_an_end_id_stops_a_grammar_before_its_budget(name: str) -> None:
    run = run_grammar("md2", name)
    assert run.finish is FinishReason.STOP
    assert len(run.size_bins) < golden("md2").cases[name]["settings"]["max_objects"]


@pytest.mark.parametrize("family", FAMILIES)
def test_one_pass_over_the_whole_prompt_gives_the_stream_after_every_block(family: str) -> None:
    data, spec, expected = golden(family), golden(family).onepass, tensors(family, "text")
    image, naive, text = pixels(spec["image"]), golden(family).naive, golden(family).model.text
    items, images = naive.context(image, Text(spec["prompt_tokens_after_image"]))
    run = naive.prefill(items, images)
    assert len(run.attention.block_of) == spec["seq_len"]
    assert_close(run.last.logits_V, expected["onepass.logits_last"], LOGITS_TOLERANCE)
    attention = DenseAttention()
    attention.block_of = run.attention.block_of
    with torch.inference_mode():
        x_TD = torch.cat([naive.embed_item(item, images) for item in items])
        positions = torch.arange(len(x_TD))
        streams, pending, step = [x_TD[spec["rows"]]], (), Step(positions, attention, text.rope)
        for block in text.blocks:
            x_TD, pending = block(x_TD, pending, step)
            streams.append(sum(pending, x_TD)[spec["rows"]])
    assert len(streams) == data.config.text.n_layers + 1
    assert_close(torch.stack(streams), expected["onepass.hidden_after_k_blocks"], LOGITS_TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_prefilling_in_two_parts_equals_one_pass(family: str) -> None:
    naive = golden(family).naive
    items, images = naive.context(pixels("small"), Text([1, 309, 2, 294, 3]))
    whole = naive.prefill(items, images)
    parts = naive.prefill(items[:1], images)
    for item in items[1:]:
        assert isinstance(item, TextToken)
        naive.feed(parts, item)
    assert_close(parts.last.logits_V, whole.last.logits_V, 1e-5)


def test_a_second_image_is_a_block_of_its_own_and_sees_what_came_before() -> None:
    naive: NaiveMoondream = golden("md2").naive
    config: MoondreamConfig = golden("md2").config
    images = {image_digest(image): image for image in (pixels("small"), pixels("multi"))}
    first_digest, second_digest = images
    first = ImageSpan(first_digest, 730, config.tokenizer.bos_id)
    second = ImageSpan(second_digest, config.vision.num_patches)
    run = naive.prefill([first, TextToken(294), second, TextToken(295)], images)
    assert run.attention.block_of == [0] * 730 + [NO_BLOCK] + [2] * 729 + [NO_BLOCK]
    alone = naive.prefill([TextToken(config.tokenizer.bos_id), TextToken(294), second, TextToken(295)], images)
    assert not torch.allclose(run.last.logits_V, alone.last.logits_V, atol=1e-3)
