"""The manifests are what Kubernetes' published schema allows, and fit together and with the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
MANIFESTS = {
    str(path.relative_to(FOLDER)): yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in sorted(FOLDER.rglob("*.yaml"))
}
DEPLOYMENT = MANIFESTS["base/deployment.yaml"]
POD = DEPLOYMENT["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]
ENVIRONMENT = {variable["name"]: variable.get("value") for variable in CONTAINER["env"]}
CHECKED = ("base/deployment.yaml", "base/service.yaml", "optional/hpa.yaml", "optional/network-policy.yaml")
CLOSING_S = 5
"""What the server takes after the drain time to close its connections."""


@pytest.mark.parametrize("version", ["1.28", "1.31"])
@pytest.mark.parametrize("name", CHECKED)
def test_a_manifest_fits_the_published_schema(name: str, version: str) -> None:
    kubernetes_validate.validate(MANIFESTS[name], version, strict=True)


def test_the_schema_check_notices_a_wrong_field() -> None:
    wrong = {**DEPLOYMENT, "spec": {**DEPLOYMENT["spec"], "replica": 3}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.31", strict=True)


def test_the_gpu_patch_makes_a_valid_deployment() -> None:
    """Merged by hand as far as the schema cares: the patch's container fields over the base's."""
    patch = MANIFESTS["gpu/one-gpu.yaml"]
    (changed,) = patch["spec"]["template"]["spec"]["containers"]
    assert patch["metadata"]["name"] == DEPLOYMENT["metadata"]["name"]
    assert changed["name"] == CONTAINER["name"]
    container = {**CONTAINER, **changed}
    pod = {**POD, "spec": {**POD["spec"], "containers": [container]}}
    merged = {**DEPLOYMENT, "spec": {**DEPLOYMENT["spec"], **patch["spec"], "template": pod}}
    kubernetes_validate.validate(merged, "1.31", strict=True)
    assert changed["resources"]["limits"]["nvidia.com/gpu"] == 1


@pytest.mark.parametrize("name", ["base/kustomization.yaml", "gpu/kustomization.yaml"])
def test_a_kustomization_names_files_that_exist(name: str) -> None:
    folder = (FOLDER / name).parent
    named = MANIFESTS[name]["resources"] + [patch["path"] for patch in MANIFESTS[name].get("patches", [])]
    assert named
    assert [entry for entry in named if not (folder / entry).exists()] == []


def test_the_grace_period_covers_pre_stop_drain_and_closing() -> None:
    (command, seconds) = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    needed_s = int(seconds) + float(ENVIRONMENT["KESTREL_DRAIN_TIMEOUT_S"] or "") + CLOSING_S
    assert needed_s < POD["spec"]["terminationGracePeriodSeconds"] <= needed_s + 30


def test_probes_ask_the_right_routes() -> None:
    paths = {kind: CONTAINER[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/healthz", "readiness": "/ready", "liveness": "/healthz"}
    ports = {CONTAINER[f"{kind}Probe"]["httpGet"]["port"] for kind in paths}
    assert ports == {port["name"] for port in CONTAINER["ports"]}
    startup = CONTAINER["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 300


def test_the_container_has_no_more_rights_than_it_needs() -> None:
    assert POD["spec"]["securityContext"]["runAsNonRoot"] is True
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"] is True
    assert CONTAINER["securityContext"]["capabilities"]["drop"] == ["ALL"]
    assert POD["spec"]["automountServiceAccountToken"] is False
    (key,) = [variable for variable in CONTAINER["env"] if variable["name"] == "KESTREL_API_KEY"]
    assert "value" not in key


def selects(selector: dict[str, Any]) -> bool:
    return selector.items() <= POD["metadata"]["labels"].items()


def test_everything_points_at_the_deployments_pods() -> None:
    assert selects(DEPLOYMENT["spec"]["selector"]["matchLabels"])
    assert selects(MANIFESTS["base/service.yaml"]["spec"]["selector"])
    assert selects(MANIFESTS["optional/network-policy.yaml"]["spec"]["podSelector"]["matchLabels"])
    target = MANIFESTS["optional/hpa.yaml"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", DEPLOYMENT["metadata"]["name"])
    (port,) = MANIFESTS["base/service.yaml"]["spec"]["ports"]
    assert port["targetPort"] == CONTAINER["ports"][0]["name"]
    assert str(CONTAINER["ports"][0]["containerPort"]) == ENVIRONMENT["KESTREL_PORT"]


def test_the_autoscaler_asks_for_the_name_the_adapter_gives() -> None:
    (metric,) = MANIFESTS["optional/hpa.yaml"]["spec"]["metrics"]
    (rule,) = MANIFESTS["optional/prometheus-adapter-values.yaml"]["rules"]["custom"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    assert rule["name"]["matches"] == "^vllm:num_requests_waiting$"
    assert '__name__="vllm:num_requests_waiting"' in rule["seriesQuery"]
