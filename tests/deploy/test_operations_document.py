"""The document for operators names every metric there is, and none that is not."""

from __future__ import annotations

import re
from pathlib import Path

from kestrel.engine import EngineSnapshot
from kestrel.server.metrics import ServerMetrics

TEXT = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")


def test_the_document_lists_exactly_the_metrics_of_the_page() -> None:
    metrics = ServerMetrics("tiny", lambda: EngineSnapshot(0, 0, 1, 0, 0, 16, 4, 0, 0, 0, 0))
    exposed = set(re.findall(r"^# TYPE (\S+)", metrics.text().decode(), re.MULTILINE))
    documented = set(re.findall(r"`((?:kestrel_|vllm:)\w+)`", TEXT))
    assert documented == {name for name in exposed if not name.endswith("_created")}
