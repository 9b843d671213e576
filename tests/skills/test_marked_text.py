"""A marked text answers a template as the original would, and what it gives stays marked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from kestrel.skills.chat_template import MarkedText
from tests.exhaustive import given_examples

TWINS = str.maketrans({"<": "\U000f0000", ">": "\U000f0001", "|": "\U000f0002"})
BACK = str.maketrans({"\U000f0000": "<", "\U000f0001": ">", "\U000f0002": "|"})
Use = Callable[[Any, Any], Any]
USES: dict[str, Use] = {
    "in": lambda text, part: part in text,
    "equal": lambda text, part: (text == part, part == text, text != part, hash(text) == hash(part)),
    "add": lambda text, part: text + part,
    "added": lambda text, part: part + text,
    "find": lambda text, part: (text.find(part), text.rfind(part), text.count(part), text.find(part, 1, 3)),
    "starts": lambda text, part: (text.startswith(part), text.endswith(part), text.startswith((part, "<"))),
    "remove": lambda text, part: (text.removeprefix(part), text.removesuffix(part)),
    "strip": lambda text, part: (text.strip(), text.lstrip(), text.rstrip()),
    "strip characters": lambda text, part: (text.strip(part), text.lstrip(part), text.rstrip(part)),
    "split": lambda text, part: (text.split(), text.split(None, 1), text.rsplit(None, 1)),
    "split at": lambda text, part: (text.split(part or "<"), text.split("<", 1), text.rsplit(part or ">", 1)),
    "lines": lambda text, part: (text.splitlines(), text.splitlines(True)),
    "partition": lambda text, part: (text.partition(part or "<"), text.rpartition(part or "<")),
    "replace": lambda text, part: (text.replace(part, "x"), text.replace("<", part, 1)),
    "slice": lambda text, part: (text[1:3], text[:-1], text[::-1], text[:1]),
    "letters": lambda text, part: (list(text), len(text), text[0] if text else ""),
    "case": lambda text, part: (text.lower(), text.upper()),
    "string": lambda text, part: str(text),
}


def restored(value: Any) -> Any:
    if isinstance(value, str):
        return str.__str__(value).translate(BACK)
    return type(value)(map(restored, value)) if isinstance(value, (list, tuple)) else value


text = st.text(alphabet="<>|a b\n", max_size=8)


@given_examples(120, 800, text, text)
def test_a_marked_text_is_used_as_the_original(original: str, part: str) -> None:
    marked = MarkedText.of(original.translate(TWINS), original)
    for name, use in USES.items():
        assert restored(use(marked, part)) == use(original, part), name


def test_what_is_cut_out_can_be_searched_again() -> None:
    original = "<think>a|</think>b"
    marked: Any = MarkedText.of(original.translate(TWINS), original)
    thought = ("x" + marked).split("</think>")[0].split("<think>")[-1]
    assert thought == "a|"
    assert "".join([thought]) == "a\U000f0002", "as it is written it stays marked"
