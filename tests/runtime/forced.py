"""Teacher forcing through the real decode path: a grammar that allows one id per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kestrel.grammar import Edge, Grammar, State
from kestrel.moondream.model import MoondreamModel
from kestrel.tokens import Text
from tests.moondream.goldens import Golden, pixels, tensors
from tests.runtime.paged import Case, Paged, paged


def forced_grammar(ids: list[int]) -> Grammar:
    """Emits exactly `ids`, as plain text, when the budget is their number."""
    last = len(ids) - 1
    states = (State(f"{i}", Edge(min(i + 1, last)), allowed=(token,)) for i, token in enumerate(ids))
    return Grammar("forced", tuple(states))


def text_cases(g: Golden) -> list[str]:
    """Golden cases that are plain text from the first token to the last."""
    return [name for name, case in g.cases.items() if "generated_tokens" in case and "tokenizer_overrides" not in case]


def case_of(g: Golden, name: str) -> Case:
    case: dict[str, Any] = g.cases[name]
    ids = case["generated_tokens"]
    if "length" in case:
        template = g.config.tokenizer.templates[f"caption.{case['length']}"].prefix
        parts = Text(template)
    else:
        parts = g.naive.query_items(case["question"], case.get("spatial_refs", ()), False)
    context, images = g.naive.context(None if case["image"] is None else pixels(case["image"]), parts)
    return Case(name, context, forced_grammar(ids), len(ids), images)


@dataclass(frozen=True)
class Closeness:
    agreement: float
    """Share of steps whose most likely token is the golden one."""
    largest: float
    """Largest difference of any logit."""
    relative_rms: float
    """Root mean square of the differences over that of the golden logits."""


def compare_with_golden(g: Golden, family: str, model: MoondreamModel, **choices: Any) -> Closeness:
    """Over every step of all text cases; `choices` are those of `paged`."""
    return compare_engine(g, family, paged(model, **choices))


def compare_engine(g: Golden, family: str, engine: Paged, names: Sequence[str] = ()) -> Closeness:
    """Over every step of the named text cases, or of all."""
    return closeness(family, {name: logits_of(engine, g, name) for name in names or text_cases(g)})


def logits_of(engine: Paged, g: Golden, name: str) -> Tensor:
    """One row per step of a case."""
    engine.decoder.logits_seen.clear()
    engine.run(case_of(g, name))
    return torch.cat(engine.decoder.logits_seen).float().cpu()


def closeness(family: str, logits: Mapping[str, Tensor]) -> Closeness:
    """Of cases by name to what the reference computed."""
    golden = [tensors(family, "text")[f"{name}.logits"][: len(ours_SV)] for name, ours_SV in logits.items()]
    ours_SV, golden_SV = torch.cat(list(logits.values())), torch.cat(golden)
    difference_SV = ours_SV - golden_SV
    return Closeness(
        agreement=(ours_SV.argmax(-1) == golden_SV.argmax(-1)).float().mean().item(),
        largest=difference_SV.abs().max().item(),
        relative_rms=(difference_SV.square().mean() / golden_SV.square().mean()).sqrt().item(),
    )
