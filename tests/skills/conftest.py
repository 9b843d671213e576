from __future__ import annotations

import pytest

from kestrel.skills.base import ModelProfile

from .model_profiles import golden_profile


@pytest.fixture
def md2() -> ModelProfile:
    return golden_profile("md2")


@pytest.fixture
def md3() -> ModelProfile:
    return golden_profile("md3")
