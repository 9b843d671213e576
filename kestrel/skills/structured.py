"""Answers in a format: what the text skills share to offer `response_format`."""

from __future__ import annotations

from kestrel.errors import RequestError
from kestrel.grammar import Grammar
from kestrel.request import Constraint
from kestrel.skills.base import ModelProfile
from kestrel.skills.builtin import SampledRequest


def answer_constraint(request: SampledRequest, grammar: Grammar, profile: ModelProfile) -> Constraint | None:
    """The constraint a request asks for. It holds in the last phase of its grammar, so thinking stays free."""
    if request.response_format is None:
        return None
    if profile.constraints is None:
        raise RequestError("response_format", f"is not supported by {profile.name}; leave it out or use another model")
    if request.sampling.allowed_ids or request.sampling.suppressed_ids:
        remedy = "the two can leave no token at all; give one of them"
        raise RequestError("response_format", f"does not go with allowed_ids or suppressed_ids: {remedy}")
    answer_phase = max(state.phase for state in grammar.states)
    return Constraint(profile.constraints.start(request.response_format), answer_phase)
