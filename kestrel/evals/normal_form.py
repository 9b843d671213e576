"""When two answers are the same: case, a leading article, a full stop and quotation marks do not matter.

Text read off a picture is the exception: it must be as printed.
"""

from __future__ import annotations

import re

from kestrel.evals.truths import AnswerTruth

NUMBER_WORDS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)
_VALUES = {word: value for value, word in enumerate(NUMBER_WORDS)}
_NUMBER = re.compile(rf"\b(?:[0-9]{{1,6}}|{'|'.join(NUMBER_WORDS)})\b")
_ARTICLE = re.compile(r"(?:an?|the)\s+")
_AROUND = " \t\n\"'.!"


def is_right(reply: str, truth: AnswerTruth) -> bool:
    if truth.is_printed:
        return reply.strip() == truth.answer
    return normal_form(reply) == normal_form(truth.answer)


def normal_form(answer: str) -> str:
    text = answer.casefold().strip(_AROUND)
    text = _ARTICLE.sub("", text, count=1) if _ARTICLE.match(text) else text
    text = " ".join(text.split())
    return str(_VALUES[text]) if text in _VALUES else text


def only_number_in(answer: str) -> int | None:
    """The number an answer gives, in digits or as a word; None when it gives none or several."""
    numbers = _NUMBER.findall(answer.casefold())
    return number_value(numbers[0]) if len(numbers) == 1 else None


def number_value(text: str) -> int:
    """Of digits or a number word."""
    return _VALUES[text] if text in _VALUES else int(text)
