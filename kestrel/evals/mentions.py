"""What a caption mentions: names of things with how many of them, as in "A cat, 2 red stars and the word "tea"."

Text in quotation marks is what is printed and names nothing. A plural without a number counts as one mention.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache

from kestrel.evals.normal_form import NUMBER_WORDS, number_value
from kestrel.train.scenes.catalogue import COLOUR_NAMES, KINDS
from kestrel.train.tasks.view import UNKNOWN_THINGS

_QUOTED = re.compile(r'"[^"]*"|“[^”]*”')


def mentioned_names(caption: str) -> Counter[str]:
    """How often each name is mentioned, by its singular; things that are never drawn are names too."""
    pattern, singulars = _vocabulary()
    mentioned: Counter[str] = Counter()
    for number, name in pattern.findall(_QUOTED.sub(" ", caption.casefold())):
        mentioned[singulars[name]] += number_value(number) if number else 1
    return +mentioned


@lru_cache
def _vocabulary() -> tuple[re.Pattern[str], dict[str, str]]:
    singulars = {form: name for name, plural in UNKNOWN_THINGS.items() for form in (name, plural)}
    singulars |= {form: kind.name for kind in KINDS for form in (kind.name, kind.plural)}
    longest_first = sorted(singulars, key=len, reverse=True)
    number = rf"(?:([0-9]{{1,3}}|{'|'.join(NUMBER_WORDS)})\s+)?"
    colour = rf"(?:(?:{'|'.join(COLOUR_NAMES)})\s+)?"
    return re.compile(rf"\b{number}{colour}({'|'.join(longest_first)})\b"), singulars
