"""Questions about printed words and numbers: what does it say. The answer is the text as printed, spelt out."""

from __future__ import annotations

from random import Random

from kestrel.train.tasks.answers import UNANSWERABLE, UNANSWERABLE_SHARE, direct, spelt
from kestrel.train.tasks.example import TaskExample
from kestrel.train.tasks.view import Group, SceneView
from kestrel.train.tasks.wording import asked

READ_TEXT = (
    "What does the text say?",
    "What does it say?",
    "Read the text.",
    "What is written?",
    "What text is in the picture?",
    "What is the text in the image?",
    "Which text do you see?",
)
READ_GROUP = (
    "What does the {thing} say?",
    "Read the {thing}.",
    "What {thing} is written?",
    "What {thing} do you see?",
    "What is the {thing} in the picture?",
    "Which {thing} is printed?",
)
READ_COLOUR = (
    "What does the {colour} text say?",
    "Read the {colour} text.",
    "What is written in {colour}?",
    "What text is printed in {colour}?",
    "What does it say in {colour}?",
    "Which text is {colour}?",
)


def read(view: SceneView, rng: Random) -> TaskExample | None:
    """Text that the question singles out; "no" where nothing is printed."""
    if not view.printed:
        return direct("read", asked(rng, READ_TEXT), UNANSWERABLE) if rng.random() < UNANSWERABLE_SHARE else None
    questions: list[tuple[str, str]] = []
    if len(view.printed) == 1:
        questions.append((asked(rng, READ_TEXT), view.printed[0].text or ""))
    groups = [group for group in view.unique if group.only.text is not None]
    questions += [(asked(rng, READ_GROUP, thing=group.singular), group.only.text or "") for group in groups]
    questions += [(asked(rng, READ_COLOUR, colour=colour), text) for colour, text in _by_colour(view)]
    if not questions:
        return None
    question, text = rng.choice(questions)
    return direct("read", question, spelt(text))


def text_group(view: SceneView) -> Group:
    """Everything printed, as "text"."""
    return Group("text", "text", view.printed)


def _by_colour(view: SceneView) -> list[tuple[str, str]]:
    """Colours that only one printed thing has, and what it says."""
    texts: dict[str, list[str]] = {}
    for thing in view.printed:
        texts.setdefault(thing.colour or "", []).append(thing.text or "")
    return [(colour, here[0]) for colour, here in texts.items() if colour and len(here) == 1]
