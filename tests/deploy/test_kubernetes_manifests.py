"""The manifests are what the published schemas allow, and fit together and with the server."""

from __future__ import annotations

import copy
import json
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from kestrel.config import RuntimeConfig, flag_names
from kestrel.integrations.cluster.app_settings import FILE_VARIABLE, app_settings
from kestrel.server.config import ServerConfig
from tests.deploy.custom_resources import pod_specs, require_valid
from tests.deploy.fitting import require_servers_fit, served_paths

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
DOCUMENTS: dict[str, list[dict[str, Any]]] = {
    str(path.relative_to(FOLDER)): list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    for path in sorted(FOLDER.rglob("*.yaml"))
}
MANIFESTS = {name: documents[0] for name, documents in DOCUMENTS.items()}
GATEWAY = {one["kind"]: one for one in DOCUMENTS["gateway/inference-gateway.yaml"]}
PICKER = {one["kind"]: one for one in DOCUMENTS["gateway/endpoint-picker.yaml"]}
DEPLOYMENT = MANIFESTS["base/deployment.yaml"]
POD = DEPLOYMENT["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]
ENVIRONMENT = {variable["name"]: variable.get("value") for variable in CONTAINER["env"]}
KUBERNETES_OWN = (
    "base/deployment.yaml", "base/service.yaml", "many/disruption-budget.yaml", "optional/hpa.yaml",
    "optional/network-policy.yaml", "optional/model-volume/claim.yaml", "gateway/endpoint-picker.yaml",
)  # fmt: skip
OF_OTHERS = ("gateway/inference-gateway.yaml", "kserve.yaml", "ray-service.yaml")
PATCHES = (
    "gpu/one-gpu.yaml",
    "many/sticky-service.yaml",
    "optional/model-volume/cache.yaml",
    "gateway/open-metrics.yaml",
)
NOT_SERVED = ("optional/prometheus-adapter-values.yaml", "gateway/istio.yaml")
"""Values of a chart, and a kind that Istio alone knows: no schema here."""
OF_THE_CHART = ("host", "port", "drain_timeout_s", "api_keys", "urgent_api_keys")
"""Settings that have values of their own there, or are secrets."""


def test_every_manifest_is_checked() -> None:
    known = {*KUBERNETES_OWN, *OF_OTHERS, *PATCHES, *NOT_SERVED}
    assert {name for name in DOCUMENTS if not name.endswith("kustomization.yaml")} == known


@pytest.mark.parametrize("version", ["1.28", "1.31", "1.34"])
@pytest.mark.parametrize("name", KUBERNETES_OWN)
def test_a_manifest_fits_the_published_schema(name: str, version: str) -> None:
    for document in DOCUMENTS[name]:
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("name", OF_OTHERS)
def test_a_manifest_of_another_kind_fits_its_published_definition(name: str) -> None:
    for document in DOCUMENTS[name]:
        require_valid(document)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("gateway/inference-gateway.yaml", ("spec",)),
        ("kserve.yaml", ("spec", "predictor")),
        ("kserve.yaml", ("spec", "predictor", "containers", 0)),
        ("ray-service.yaml", ("spec", "rayClusterConfig", "headGroupSpec", "template", "spec", "containers", 0)),
    ],
)
def test_a_wrong_field_of_another_kind_is_noticed(name: str, place: tuple[str | int, ...]) -> None:
    wrong = copy.deepcopy(DOCUMENTS[name][-1])
    part: Any = wrong
    for step in place:
        part = part[step]
    part["colour"] = "red"
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        require_valid(wrong)


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


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name.endswith("kustomization.yaml")])
def test_a_kustomization_names_files_that_exist(name: str) -> None:
    folder, told = (FOLDER / name).parent, MANIFESTS[name]
    named = told["resources"] + told.get("components", []) + [patch["path"] for patch in told.get("patches", [])]
    assert [entry for entry in named if not (folder / entry).exists()] == []


@pytest.mark.parametrize("name", ["base/deployment.yaml", "kserve.yaml"])
def test_a_server_can_be_started_asked_and_ended_as_the_manifest_says(name: str) -> None:
    assert require_servers_fit(MANIFESTS[name]) == 1


def test_an_option_that_the_server_does_not_have_is_noticed() -> None:
    wrong = copy.deepcopy(MANIFESTS["kserve.yaml"])
    wrong["spec"]["predictor"]["containers"][0]["args"] += ["--colour", "red"]
    with pytest.raises(Exception, match="No such option: --colour"):
        require_servers_fit(wrong)


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
    (keys,) = [volume for volume in POD["spec"]["volumes"] if volume["name"] == "keys"]
    assert keys["secret"]["defaultMode"] == 0o440
    assert "KESTREL_API_KEY" not in ENVIRONMENT
    assert ENVIRONMENT["KESTREL_CONFIG"] == "/etc/kestrel/kestrel.yaml"


def selects(selector: dict[str, Any]) -> bool:
    return selector.items() <= POD["metadata"]["labels"].items()


def test_everything_points_at_the_deployments_pods() -> None:
    assert selects(DEPLOYMENT["spec"]["selector"]["matchLabels"])
    assert selects(MANIFESTS["base/service.yaml"]["spec"]["selector"])
    assert selects(MANIFESTS["optional/network-policy.yaml"]["spec"]["podSelector"]["matchLabels"])
    assert selects(MANIFESTS["many/disruption-budget.yaml"]["spec"]["selector"]["matchLabels"])
    assert selects(GATEWAY["InferencePool"]["spec"]["selector"]["matchLabels"])
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


def test_the_gateway_finds_the_servers_and_the_endpoint_picker() -> None:
    pool, picker = GATEWAY["InferencePool"], PICKER["Deployment"]["spec"]["template"]
    assert [port["number"] for port in pool["spec"]["targetPorts"]] == [CONTAINER["ports"][0]["containerPort"]]
    reference, service = pool["spec"]["endpointPickerRef"], PICKER["Service"]
    assert reference["name"] == service["metadata"]["name"]
    assert reference["port"]["number"] == service["spec"]["ports"][0]["port"]
    assert service["spec"]["selector"] == picker["metadata"]["labels"]
    (container,) = picker["spec"]["containers"]
    flags = dict(argument.removeprefix("--").split("=") for argument in container["args"])
    assert flags["pool-name"] == pool["metadata"]["name"]
    assert int(flags["grpc-port"]) == reference["port"]["number"]
    pooled, others = GATEWAY["HTTPRoute"]["spec"]["rules"]
    assert pooled["backendRefs"][0]["name"] == pool["metadata"]["name"]
    assert {match["path"]["value"] for match in pooled["matches"]} <= served_paths()
    back = MANIFESTS["base/service.yaml"]
    assert others["backendRefs"] == [{"name": back["metadata"]["name"], "port": back["spec"]["ports"][0]["port"]}]


def test_the_endpoint_picker_may_read_the_metrics() -> None:
    (container,) = MANIFESTS["gateway/open-metrics.yaml"]["spec"]["template"]["spec"]["containers"]
    assert container["name"] == CONTAINER["name"]
    assert container["env"] == [{"name": "KESTREL_METRICS_OPEN", "value": "true"}]


def test_the_ray_service_has_settings_that_there_are(tmp_path: Path) -> None:
    spec = MANIFESTS["ray-service.yaml"]["spec"]
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    assert application["import_path"] == "kestrel.integrations.ray:app"
    (head, worker) = [pod["containers"][0]["env"] for pod in pod_specs(spec)]
    assert head == worker
    variables = {variable["name"]: variable["value"] for variable in head}
    keys = tmp_path / Path(variables[FILE_VARIABLE]).name
    keys.write_text("api_keys: [secret]")
    engines, server, _ = app_settings(application["args"], {**variables, FILE_VARIABLE: str(keys)})
    assert server.api_keys == ("secret",)
    assert not server.insecure
    (workers,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    assert workers["replicas"] == engines.replicas
    assert workers["template"]["spec"]["terminationGracePeriodSeconds"] > server.drain_timeout_s


def test_every_pod_of_the_ray_service_can_read_the_keys() -> None:
    (base,) = [volume for volume in POD["spec"]["volumes"] if volume["name"] == "keys"]
    for pod in pod_specs(MANIFESTS["ray-service.yaml"]):
        assert base in pod["volumes"]
        (mount,) = [mount for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == "keys"]
        variables = {variable["name"]: variable["value"] for variable in pod["containers"][0]["env"]}
        assert Path(variables[FILE_VARIABLE]).parent == Path(mount["mountPath"])
        assert pod["securityContext"]["fsGroup"] == POD["spec"]["securityContext"]["fsGroup"]


def schema_of(field: Field[Any]) -> dict[str, Any]:
    """What the chart takes for a setting: Helm keeps numbers of a file as floats, and joins lists by blanks."""
    kinds = {
        "int": {"type": "integer", "maximum": 2**53 - 1},
        "float": {"type": "number"},
        "bool": {"type": "boolean"},
        "tuple[str, ...]": {"type": "array", "items": {"type": "string", "pattern": "^\\S+$"}},
    }
    return kinds.get(str(field.type).removesuffix(" | None"), {"type": "string"})


def test_the_chart_takes_the_settings_that_the_server_has() -> None:
    path = FOLDER.parent / "helm" / "kestrel" / "values.schema.json"
    settings = json.loads(path.read_text(encoding="utf-8"))["properties"]["settings"]
    has = [field for group in (RuntimeConfig, ServerConfig) for field in fields(group) if flag_names(field)]
    assert settings["properties"] == {field.name: schema_of(field) for field in has if field.name not in OF_THE_CHART}
    assert settings["additionalProperties"] is False
