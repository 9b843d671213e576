"""The hub, played by a server on the loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models.loopback_hub import Hub, running_hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub(tmp_path / "cache", monkeypatch) as hub:
        yield hub
