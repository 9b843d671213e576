"""What a server asks itself before it calls itself ready."""

from __future__ import annotations

from typing import Any

import pytest

from kestrel.config import RuntimeConfig
from kestrel.constraints.compiler import ConstraintCompiler
from kestrel.engine import InferenceEngine
from kestrel.engine.api import WARM_UP_FIELDS, WARM_UP_TENANT, warm_up


async def test_every_skill_runs_once_for_a_tenant_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    answered: list[str] = []
    async with await InferenceEngine.create(RuntimeConfig(device="cpu", kv_cache_pages=200)) as engine:
        run = engine.run

        async def noted(skill: str, **fields: Any) -> Any:
            assert fields["tenant"] == WARM_UP_TENANT
            result = await run(skill, **fields)
            answered.append(result.skill)
            return result

        monkeypatch.setattr(engine, "run", noted)
        assert await warm_up(engine) > 0
    assert answered == list(WARM_UP_FIELDS)


async def test_the_vocabulary_for_formats_is_read_before_anybody_asks_for_one() -> None:
    async with await InferenceEngine.create(RuntimeConfig(device="cpu", kv_cache_pages=200)) as engine:
        constraints = engine.profile.constraints
        assert isinstance(constraints, ConstraintCompiler)
        assert not constraints.is_prepared
        await warm_up(engine)
        assert constraints.is_prepared
        assert constraints.num_kept == 0
