"""Model profiles of the tiny golden models, built by hand from their config files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers
from safetensors.numpy import load_file

from kestrel.models.tokenizer import TextTokenizer
from kestrel.moondream.prompts import QueryBlocks
from kestrel.skills.base import ModelProfile, RegionIds, SkillDefaults, Template

GOLDENS = Path(__file__).parents[1] / "goldens"
IMAGE_POSITIONS = 729


class GoldenTokenizer:
    def __init__(self, path: Path) -> None:
        self.inner = tokenizers.Tokenizer.from_file(str(path))
        self.inner.encode_special_tokens = True
        self.token_bytes = TextTokenizer.from_file(path).token_bytes

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode(list(ids), skip_special_tokens=True)


@lru_cache
def golden_tokenizer(model: str) -> GoldenTokenizer:
    return GoldenTokenizer(GOLDENS / model / "tokenizer.json")


@lru_cache
def golden_cases(model: str) -> dict[str, Any]:
    return json.loads((GOLDENS / model / "cases.json").read_text())


@lru_cache
def golden_logits(model: str) -> dict[str, Any]:
    return load_file(GOLDENS / model / "text.safetensors")


def golden_profile(model: str, overrides: dict[str, int] | None = None) -> ModelProfile:
    """`overrides` replaces special ids as a golden case asks; templates keep theirs."""
    config = json.loads((GOLDENS / model / "config.json").read_text())["tokenizer"]
    given = config["templates"]
    templates = {f"caption.{length}": Template(tuple(ids)) for length, ids in given["caption"].items()}
    for skill in ("query", "detect", "point"):
        templates[skill] = Template(tuple(given[skill]["prefix"]), tuple(given[skill]["suffix"]))
    is_md3 = model == "md3"
    if is_md3:
        templates["segment"] = Template((1, 313, 2), (3,))
    ids = config | (overrides or {})
    suffix, thinking = templates["query"].suffix, config["thinking_id"]
    return ModelProfile(
        name=f"tiny-{model}",
        tokenizer=golden_tokenizer(model),
        bos=ids["bos_id"],
        stop_ids=(ids["eos_id"],),
        has_vision=True,
        chat=QueryBlocks(),
        templates=templates,
        answer_opener=suffix if is_md3 else suffix * 2,
        reasoning_opener=(thinking,) if is_md3 else (*suffix, thinking),
        compares_coord_and_eos_only=is_md3,
        defaults=SkillDefaults(0.5, 0.9 if is_md3 else 0.3, 768, 150 if is_md3 else 50, reasoning=is_md3),
        answer_id=ids["answer_id"],
        regions=RegionIds(ids["coord_id"], ids["size_id"], ids["start_ground_points_id"], ids["end_ground_id"]),
    )
