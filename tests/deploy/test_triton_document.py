"""docs/triton.md says what is so: inputs, variables, settings of the manifests, and scripts."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kestrel.config import RuntimeConfig, environment_names
from kestrel.integrations.inference_protocol import BOOL, INPUTS, SKILLS
from kestrel.integrations.triton_server import DRAIN_S

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "triton.md").read_text(encoding="utf-8")
MANIFESTS: dict[str, Any] = {
    manifest["kind"]: manifest
    for manifest in map(yaml.safe_load, re.findall(r"^```yaml\n(.*?)^```$", TEXT, re.M | re.S))
}
POD = MANIFESTS["Deployment"]["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


@pytest.mark.parametrize("version", ["1.28", "1.31"])
@pytest.mark.parametrize("kind", ["Deployment", "Service"])
def test_a_manifest_fits_the_published_schema(kind: str, version: str) -> None:
    kubernetes_validate.validate(MANIFESTS[kind], version, strict=True)


def test_the_service_finds_the_deployments_port() -> None:
    labels = MANIFESTS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert MANIFESTS["Service"]["spec"]["selector"] == labels
    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    assert {port["targetPort"] for port in MANIFESTS["Service"]["spec"]["ports"]} <= set(ports)


def test_requests_get_their_time_before_triton_and_kubernetes_end_it() -> None:
    (exit_timeout,) = re.findall(r"--exit-timeout-secs=(\d+)", " ".join(CONTAINER["args"]))
    assert DRAIN_S < int(exit_timeout) < POD["terminationGracePeriodSeconds"]


def test_variables_that_are_named_exist() -> None:
    known = {name: field for field in fields(RuntimeConfig) for name in environment_names(field)}
    rows = dict(re.findall(r"^\| `(KESTREL_\w+)` \| ([^|]*) \|", TEXT, re.M))
    assert set(rows) | {e["name"] for e in CONTAINER["env"]} - {"HF_HOME"} <= set(known)
    written = {name: text.strip("`") for name, text in rows.items() if text.startswith("`")}
    assert written == {name: str(known[name].default) for name in written}


def test_every_input_is_in_the_table() -> None:
    rows = dict(re.findall(r"^\| `([A-Z_]+)` \| (.*) \|$", TEXT.split("## Requests")[1], re.M))
    assert list(rows) == [known.name for known in INPUTS]
    assert [name for name, text in rows.items() if text.startswith("BOOL")] == [
        known.name for known in INPUTS if known.datatype == BOOL
    ]
    assert re.findall(r"`(\w+)`", rows["SKILL"]) == list(SKILLS)


def test_scripts_that_are_named_exist() -> None:
    named = set(re.findall(r"\b(?:scripts|triton)/[\w./-]*\w", TEXT))
    assert len(named) >= 4
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
