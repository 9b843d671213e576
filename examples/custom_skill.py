"""A skill of your own: a question answered with yes or no, and how sure the model is.

python examples/custom_skill.py examples/images/01.png "Is there a dog?"
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.errors import KestrelError, RequestError
from kestrel.grammar import Edge, Grammar, State
from kestrel.request import FinishReason, SkillOutput, TokenLogprobs
from kestrel.settings import SamplingParams
from kestrel.skills import SkillRegistry, SkillSpec, SkillState, default_skills
from kestrel.skills.base import ModelProfile, Prompt, SkillRequest
from kestrel.skills.builtin import block, opening, template_of
from kestrel.tokens import ImageSpan, TextToken, Token


@dataclass(frozen=True, slots=True, kw_only=True)
class YesNoRequest(SkillRequest):
    question: str


class YesNoSkill(SkillSpec[YesNoRequest]):
    """Result: {"answer": bool, "probability": of that answer, among yes and no}."""

    name = "yes_no"

    def parse(self, fields: Mapping[str, Any], profile: ModelProfile) -> YesNoRequest:
        given = {name: value for name, value in fields.items() if value is not None}
        if given.keys() != {"image", "question"}:
            raise RequestError("yes_no", f"takes an image and a question, nothing else (got {', '.join(given)})")
        return YesNoRequest(question=given["question"], images=(given["image"],))

    def prompt(self, request: YesNoRequest, images: Sequence[ImageSpan], profile: ModelProfile) -> Prompt:
        question = block(profile, template_of(profile, "query").prefix, (), request.question, profile.answer_opener)
        verdicts = tuple(first_ids(profile, "yes") | first_ids(profile, "no"))
        grammar = Grammar(self.name, (State("verdict", Edge(0), allowed=verdicts),))
        return Prompt((*opening(profile, images), *question), grammar, SamplingParams(max_new_tokens=1, logprobs=64))

    def start(self, request: YesNoRequest, profile: ModelProfile) -> SkillState:
        return YesNoState(profile)


class YesNoState(SkillState):
    def __init__(self, profile: ModelProfile) -> None:
        self.ids = {True: first_ids(profile, "yes"), False: first_ids(profile, "no")}
        self.weight = {True: 0.0, False: 0.0}

    def consume(self, token: Token, logprobs: TokenLogprobs | None) -> None:
        assert isinstance(token, TextToken)
        assert logprobs is not None
        logprob_of = dict(logprobs.top) | {token.id: logprobs.chosen}
        for answer, ids in self.ids.items():
            self.weight[answer] = sum(math.exp(logprob_of[i]) for i in ids if i in logprob_of)

    def finish(self, reason: FinishReason) -> SkillOutput:
        answer = self.weight[True] > self.weight[False]
        share = self.weight[answer] / max(sum(self.weight.values()), sys.float_info.min)
        return SkillOutput({"answer": answer, "probability": share}, "yes" if answer else "no")


def first_ids(profile: ModelProfile, word: str) -> set[int]:
    """Ids that begin the word in any of its spellings and no spelling of the other word."""
    other = {"yes": "no", "no": "yes"}[word]
    ids, others = (
        {profile.tokenizer.encode(blank + spelling)[0] for blank in ("", " ") for spelling in (w, w.capitalize())}
        for w in (word, other)
    )
    return ids - others


async def main(arguments: argparse.Namespace) -> None:
    registry = SkillRegistry([*default_skills(), YesNoSkill()])
    config = RuntimeConfig(model_path=arguments.weights)
    async with await InferenceEngine.create(config, skills=registry) as engine:
        result = await engine.run("yes_no", image=arguments.image, question=arguments.question)
        print(result.output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("image")
    parser.add_argument("question")
    parser.add_argument("--weights", help="a model folder; the embedded model without it")
    try:
        asyncio.run(main(parser.parse_args()))
    except KestrelError as error:
        sys.exit(f"error: {error}")
