"""The form of a short answer: lower case, no full stop, counts as digits, "yes" or "no", "nothing" for an empty place.

A question about something that is not there ("What colour is the star?" without a star) is answered "no". Printed text
is answered as printed, one token per character, because a reader spells what it sees.
"""

from __future__ import annotations

from kestrel.train.tasks.example import Apart, Piece, TaskExample

UNANSWERABLE = "no"
NOTHING = "nothing"
UNANSWERABLE_SHARE = 0.12


def direct(family: str, question: str, *answer: Piece, refs: tuple[tuple[float, ...], ...] = ()) -> TaskExample:
    """A question that is answered at once."""
    fields: dict[str, object] = {"question": question, "reasoning": False}
    if refs:
        fields["spatial_refs"] = refs
    return TaskExample(family, "query", fields, answer)


def yes_or_no(is_so: bool) -> str:
    return "yes" if is_so else "no"


def spelt(text: str) -> Apart:
    return Apart(tuple(text))
