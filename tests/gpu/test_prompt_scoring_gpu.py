"""Outputs of prompts on a GPU, with steps in flight: those of a dense pass on the CPU."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from kestrel.settings import SamplingParams
from tests.moondream.goldens import FAMILIES, golden
from tests.runtime.paged import paged
from tests.runtime.test_paged_equality import all_skills
from tests.runtime.test_prompt_scoring import asking_cases, assert_dense

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-3  # another device sums in another order


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [7, 2048])
def test_prompt_outputs_equal_a_dense_pass(family: str, budget: int) -> None:
    g = golden(family)
    engine = paged(copy.deepcopy(g.model).to("cuda"), steps_in_flight=1, max_prefill_tokens=budget)
    cases = asking_cases(g)
    silent = [replace(c, name=f"{c.name}.silent", sampling=SamplingParams(max_new_tokens=0)) for c in cases]
    final = engine.finish(*cases, *silent, *all_skills(g, "stranger"))
    for case in [*cases, *silent]:
        assert_dense(g, case, final[case.name], TOLERANCE)
