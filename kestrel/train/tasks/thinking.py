"""Questions that are thought about first. Every object the thought names is pointed at, in reading order.

A grounding mark opens a stretch that names one object and holds its point; the end mark closes it:

    I count <start> cat 1 (x)(y) <end>, <start> cat 2 (x)(y) <end>. <answer> 2
    I see <start> cat (x)(y) <end>. <answer> yes
    I see no cats. <answer> 0

Questions of other families have a plain thought, so that thinking is never a mistake:

    I look at the picture. <answer> top left
"""

from __future__ import annotations

from random import Random

from kestrel.train.scenes.truth import SceneObject
from kestrel.train.tasks import questions, references, refusals
from kestrel.train.tasks.example import Piece, SpecialToken, TaskExample, with_article, yes_or_no
from kestrel.train.tasks.locating import point_tokens
from kestrel.train.tasks.questions import counted_group, how_many, is_there, sought_group
from kestrel.train.tasks.view import SceneView

_OTHERS = (
    questions.what,
    questions.contents,
    questions.colour,
    questions.background,
    questions.where,
    questions.beside,
    questions.bigger,
    questions.read,
    references.here,
    references.count_in_box,
    refusals.refusal,
)
_START, _END, _ANSWER = SpecialToken("start_ground"), SpecialToken("end_ground"), SpecialToken("answer")


def think_count(view: SceneView, rng: Random) -> TaskExample | None:
    group = view.everything if view.objects and rng.random() < 0.1 else counted_group(view, rng)
    thought: list[Piece] = ["I count"]
    for number, thing in enumerate(group.objects, start=1):
        thought += _grounded(f" {group.singular} {number}", thing)
        thought.append("," if number < len(group) else ".")
    if not group.objects:
        thought = [f"I see no {group.plural}."]
    return _thought_about("think_count", how_many(rng, group), thought, str(len(group)))


def think_presence(view: SceneView, rng: Random) -> TaskExample | None:
    group = sought_group(view, rng)
    if group.objects:
        thought: list[Piece] = ["I see", *_grounded(f" {with_article(group.singular)}", group.objects[0]), "."]
    else:
        thought = [f"I see no {group.plural}."]
    return _thought_about("think_presence", is_there(rng, group), thought, yes_or_no(len(group) > 0))


def think_other(view: SceneView, rng: Random) -> TaskExample | None:
    """A question that needs no counting, with a thought that says little."""
    asked = rng.choice(_OTHERS)(view, rng)
    if asked is None:
        return None
    fields = {**asked.fields, "reasoning": True}
    return TaskExample("think_other", "query", fields, ("I look at the picture.", _ANSWER, *asked.target))


def _grounded(text: str, thing: SceneObject) -> list[Piece]:
    return [_START, text, *point_tokens(thing), _END]


def _thought_about(family: str, question: str, thought: list[Piece], answer: str) -> TaskExample:
    fields = {"question": question, "reasoning": True}
    return TaskExample(family, "query", fields, (*thought, _ANSWER, answer))
