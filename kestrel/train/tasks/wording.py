"""English for questions and answers: articles, lists, and the many ways people type the same question."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

_LOWERED, _UNPUNCTUATED, _POLITE = 0.15, 0.12, 0.04


def with_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def listed(parts: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def asked(rng: Random, templates: Sequence[str], **slots: str) -> str:
    """One of the templates, filled in, typed as people do: sometimes in lower case, without the mark, or politely."""
    question = rng.choice(templates).format(**slots)
    if rng.random() < _POLITE:
        question = f"Please: {question}" if rng.random() < 0.5 else f"{question} Please."
    if rng.random() < _UNPUNCTUATED:
        question = question.rstrip("?.! ")
    return question.lower() if rng.random() < _LOWERED else question


def typed(rng: Random, noun: str) -> str:
    """An object's name as people type it: mostly plain, sometimes capitalised."""
    return capitalised(noun) if rng.random() < 0.06 else noun
