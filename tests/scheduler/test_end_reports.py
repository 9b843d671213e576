"""The id that ends a sequence: told to who asked for log-probabilities, and never a token."""

from __future__ import annotations

import pytest

from kestrel.grammar import END, Edge, Grammar, State
from kestrel.request import FinishReason
from kestrel.settings import SamplingParams
from tests.scheduler.harness import EOS, Recorder, make, request, run, text

AT_ONCE = Grammar("ends at once", (State("start", Edge(0), ((EOS, Edge(END)),), allowed=(EOS,)),))


@pytest.mark.parametrize(("logprobs", "end_id"), [(None, None), (0, EOS), (3, EOS)])
def test_the_end_is_reported_with_log_probabilities_only(logprobs: int | None, end_id: int | None) -> None:
    scheduler, _ = make()
    asked = request("a", text(1, 2, 3), grammar=AT_ONCE)
    asked.sampling = SamplingParams(max_new_tokens=8, logprobs=logprobs)
    scheduler.add(asked)
    final = run(scheduler)["a"]
    assert final.finish_reason is FinishReason.STOP
    assert isinstance(asked.consumer, Recorder)
    assert (asked.consumer.end_id, asked.consumer.tokens) == (end_id, [])
