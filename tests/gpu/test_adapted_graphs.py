"""Captured steps with adapters give what the plain model gives, on the GPU."""

from __future__ import annotations

import pytest

from kestrel.kernels.ops import Ops
from kestrel.models.contract import DecoderModel
from kestrel.runtime.attention import PagedKVCache
from kestrel.runtime.bring_up import batch_sizes
from kestrel.runtime.decode import DecodeGraphs
from kestrel.runtime.executor import FastSteps
from kestrel.runtime.graph_pool import GraphPool
from kestrel.runtime.prefill_graphs import PrefillGraphs
from kestrel.runtime.rows import RowTable
from kestrel.tokens import Token
from tests.runtime.adapted import crowd, decoder_and_slots, serving, untagged
from tests.runtime.paged import Case, Paged

pytestmark = pytest.mark.gpu


def triton_ops() -> Ops:
    from kestrel.kernels.triton.ops import TRITON  # noqa: PLC0415 - needs a GPU

    return TRITON


def on_gpu(ops: Ops, family: str, num_slots: int) -> Paged:
    decoder, slots = decoder_and_slots(family, "cuda", num_slots)
    decoder.fuse(ops)

    def make(model: DecoderModel, kv: PagedKVCache, table: RowTable) -> FastSteps:
        pool = GraphPool(model.device)
        decode = DecodeGraphs(model, kv, table, ops, batch_sizes(16, filled_up=int), pool, slots)
        return FastSteps(decode, PrefillGraphs(model, kv, table, ops, 2048, pool, slots))

    return serving(decoder, slots, make, ops=ops)


def in_usual_steps(family: str, cases: list[Case]) -> dict[str, list[Token]]:
    """By the plain operations, without graphs."""
    return serving(*decoder_and_slots(family, "cuda", 5), None).run(*cases)


@pytest.mark.parametrize(("family", "num_slots"), [("md2", 5), ("md2", 2), ("md3", 5)])
def test_a_mixed_crowd_is_told_what_usual_steps_tell(family: str, num_slots: int) -> None:
    engine, cases = on_gpu(triton_ops(), family, num_slots), crowd(family, "x")
    expected = in_usual_steps(family, cases)
    assert engine.run(*cases) == expected
    again = engine.run(*reversed(crowd(family, "again")))
    assert untagged(again) == untagged(expected), "slots that were filled anew between replays"
