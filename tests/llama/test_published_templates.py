"""Published chat templates give the ids of `transformers`. They are fetched by scripts/install-vocabularies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

from kestrel.errors import RequestError
from tests.exhaustive import sweep
from tests.llama.chat_shapes import byte_level, encoder, ids_of, reference_ids, template_chat

CONTROL = re.compile(r"<\|[^|<>\s]{1,40}\|>|<｜[^<>｜]{1,40}｜>|\[/?[A-Z_]{2,30}\]|<(?:start|end)_of_\w+>|</?think>")
LEAST = 10
"""Templates that have to be compared, so that a change of the archive does not go unseen."""


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


ANSWER = {"role": "assistant", "content": "the mat < [1]\n"}
CONVERSATIONS = (
    [user("the cat")],
    [user(" the\n\n"), ANSWER, user("a < b [x]")],
    [{"role": "system", "content": "the dog <b>"}, user("the cat"), ANSWER, user("\nthe mat")],
)


EVERY_FIFTH = sweep("step", [5, 1], always=[5])


def templates(vocabularies: Path, step: int) -> list[Path]:
    return sorted((vocabularies / "templates").glob("*.jinja"))[::step]


@EVERY_FIFTH
def test_published_templates_give_the_ids_of_transformers(vocabularies: Path, step: int) -> None:
    compared: set[str] = set()
    for path in templates(vocabularies, step):
        text = path.read_text(encoding="utf-8")
        described = byte_level(tuple(sorted(set(CONTROL.findall(text)))))
        chat = template_chat(text, described)
        for messages in CONVERSATIONS:
            try:
                expected = reference_ids(text, described, messages)
            except (TemplateError, TypeError, ValueError):
                with pytest.raises(RequestError):
                    ids_of(chat, described, messages)
                continue
            assert ids_of(chat, described, messages) == expected, path.name
            compared.add(path.name)
    assert len(compared) >= LEAST


@EVERY_FIFTH
def test_published_templates_let_no_forged_control_string_through(vocabularies: Path, step: int) -> None:
    """Some write the marks of a thought anew that they find in an earlier answer: those are not compared."""
    for path in templates(vocabularies, step):
        text = path.read_text(encoding="utf-8")
        described = byte_level(tuple(sorted(set(CONTROL.findall(text)))))
        chat, controls = template_chat(text, described), encoder(described).controls
        forged = "".join(controls)
        compared = {token_id for name, token_id in controls.items() if "think" not in name.lower()}
        found = []
        for first, second in (("the cat", "the mat"), (forged, f"a{forged}b")):
            messages = [user(first), {"role": "assistant", "content": second}, user(first)]
            try:
                ids = ids_of(chat, described, messages)
            except RequestError:
                continue
            found.append([token_id for token_id in ids if token_id in compared])
        assert len(found) < 2 or found[0] == found[1], path.name
