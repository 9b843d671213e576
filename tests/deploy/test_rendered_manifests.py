"""What Helm makes of the chart, and kubectl of the kustomizations, is valid and fits the server."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import downloaded
from tests.deploy.custom_resources import require_valid
from tests.deploy.fitting import parsed, require_servers_fit

pytestmark = pytest.mark.exhaustive

FOLDER = Path(__file__).parents[2] / "deploy"
CHART = FOLDER / "helm" / "kestrel"
KEYS = ("--set", "apiKeys={change-me,another}")
SCALING = ("Deployment", "HorizontalPodAutoscaler", "PodDisruptionBudget")


def told(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    tools = downloaded("KESTREL_KUBERNETES_TOOLS", "kubernetes-tools/bin", "install-kubernetes-tools")
    return subprocess.run([tools / name, *arguments], capture_output=True, text=True, timeout=600)


def documents(ran: subprocess.CompletedProcess[str]) -> dict[str, list[dict[str, Any]]]:
    """By kind; every one is valid."""
    assert ran.returncode == 0, ran.stderr
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for document in yaml.safe_load_all(ran.stdout):
        require_valid(document)
        by_kind.setdefault(document["kind"], []).append(document)
    return by_kind


def rendered(*arguments: str) -> dict[str, list[dict[str, Any]]]:
    made = documents(told("helm", "template", "eyes", CHART, *arguments))
    (deployment,) = made["Deployment"]
    assert require_servers_fit(deployment) == 1
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert made["Service"][0]["spec"]["selector"].items() <= labels.items()
    for kind in ("PodDisruptionBudget", "InferencePool"):
        for one in made.get(kind, []):
            assert one["spec"]["selector"]["matchLabels"].items() <= labels.items()
    return made


def container_of(made: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    (container,) = made["Deployment"][0]["spec"]["template"]["spec"]["containers"]
    return container


def variables(made: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in container_of(made)["env"]}


def test_the_charts_own_values_are_one_server_on_a_cpu() -> None:
    made = rendered(*KEYS)
    assert {kind: len(of) for kind, of in made.items()} == {"Deployment": 1, "Service": 1, "Secret": 1}
    assert yaml.safe_load(made["Secret"][0]["stringData"]["kestrel.yaml"]) == {"api_keys": ["change-me", "another"]}
    assert variables(made)["KESTREL_DEVICE"] == "cpu"
    assert "nvidia.com/gpu" not in container_of(made)["resources"]["limits"]


def test_the_values_for_a_gpu_are_one_server_with_a_volume() -> None:
    made = rendered(
        *KEYS, "-f", str(CHART / "values-gpu.yaml"), "--set", "settings.trusted_proxies={10.0.0.7,10.1.0.0/16}"
    )
    assert made.keys() == {"Deployment", "Service", "Secret", "PersistentVolumeClaim"}
    assert container_of(made)["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert variables(made)["KESTREL_TRUSTED_PROXIES"] == "10.0.0.7 10.1.0.0/16"
    volumes = {volume["name"]: volume for volume in made["Deployment"][0]["spec"]["template"]["spec"]["volumes"]}
    claim = made["PersistentVolumeClaim"][0]["metadata"]["name"]
    assert volumes["cache"]["persistentVolumeClaim"]["claimName"] == claim


def test_the_values_for_many_are_a_pool_behind_a_gateway() -> None:
    scaling = ("--set", "autoscaling.enabled=true", "--set", "existingSecret=there")
    made = rendered("-f", str(CHART / "values-many.yaml"), *scaling)
    assert made.keys() == {*SCALING, "Service", "PersistentVolumeClaim", "InferencePool", "HTTPRoute"}
    assert made["HorizontalPodAutoscaler"][0]["spec"]["minReplicas"] == 3
    assert made["PersistentVolumeClaim"][0]["spec"]["accessModes"] == ["ReadWriteMany"]
    assert made["Service"][0]["spec"]["sessionAffinity"] == "ClientIP"
    assert variables(made)["KESTREL_METRICS_OPEN"] == "true"
    pooled, others = made["HTTPRoute"][0]["spec"]["rules"]
    assert pooled["backendRefs"][0]["name"] == made["InferencePool"][0]["metadata"]["name"]
    assert others["backendRefs"][0]["name"] == made["Service"][0]["metadata"]["name"]


def test_settings_reach_the_server_as_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = {
        "max_image_bytes": 20_000_000, "image_work_bytes": 2**40, "seed": 2**53 - 1, "kv_cache_memory_fraction": 0.55,
        "request_timeout_s": 1e6, "enable_prefix_cache": False, "model": 'a "b"', "root_path": "/2e7",
        "allowed_hosts": ["a.example", "b.example"], "cors_origins": ["*"], "served_model_names": ["eyes"],
    }  # fmt: skip
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump({"settings": {**written, "device": None}}))
    given = variables(rendered(*KEYS, "-f", str(path)))
    assert given["KESTREL_MAX_IMAGE_BYTES"] == "20000000"
    for name in set(given) - {"KESTREL_CONFIG"}:
        monkeypatch.setenv(name, given[name])
    assert "KESTREL_DEVICE" not in given
    assert {name: value for name, value in parsed([], "ENVIRONMENT").items() if name in written} == written


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "apiKeys: give at least one, or existingSecret, or settings.insecure=true"),
        ((*KEYS, "--set", "existingSecret=there"), "leave one of them out"),
        ((*KEYS, "--set", "replica=3"), "'replica' not allowed"),
        ((*KEYS, "--set", "settings.port=9"), "'port' not allowed"),
        ((*KEYS, "--set", "settings.urgent_api_keys={secret}"), "'urgent_api_keys' not allowed"),
        ((*KEYS, "--set", "settings.max_batchsize=64"), "'max_batchsize' not allowed"),
        ((*KEYS, "--set", "settings.max_batch_size=many"), "at '/settings/max_batch_size': got string, want integer"),
        ((*KEYS, "--set", "settings.seed=9007199254740993"), "at '/settings/seed': maximum"),
        ((*KEYS, "--set", "settings.revision=12"), "at '/settings/revision': got number, want string"),
        ((*KEYS, "--set-string", "settings.insecure=false"), "at '/settings/insecure': got string, want boolean"),
        ((*KEYS, "--set", "settings.cors_origins={https://a b}"), "at '/settings/cors_origins/0'"),
    ],
)
def test_values_that_cannot_work_are_refused(arguments: tuple[str, ...], words: str) -> None:
    ran = told("helm", "template", "eyes", CHART, *arguments)
    assert ran.returncode != 0
    assert words in ran.stderr


def test_helm_finds_nothing_to_say_about_the_chart() -> None:
    ran = told("helm", "lint", "--strict", CHART, "-f", CHART / "values-many.yaml", *KEYS)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_kustomization_of_the_gateway_has_all_parts() -> None:
    """It is made of those of many servers, one GPU and the base."""
    made = documents(told("kubectl", "kustomize", FOLDER / "kubernetes" / "gateway"))
    servers = [deployment for deployment in made["Deployment"] if require_servers_fit(deployment)]
    assert [deployment["spec"]["replicas"] for deployment in servers] == [3]
    (container,) = servers[0]["spec"]["template"]["spec"]["containers"]
    given = {variable["name"]: variable["value"] for variable in container["env"]}
    assert (given["KESTREL_MODEL"], given["KESTREL_METRICS_OPEN"]) == ("moondream2", "true")
    assert (container["image"], container["resources"]["limits"]["nvidia.com/gpu"]) == ("kestrel:cuda", 1)
    volumes = {volume["name"]: volume for volume in servers[0]["spec"]["template"]["spec"]["volumes"]}
    assert volumes["cache"] == {"name": "cache", "persistentVolumeClaim": {"claimName": "kestrel-models"}}
    assert made.keys() > {"Gateway", "HTTPRoute", "InferencePool", "PodDisruptionBudget", "PersistentVolumeClaim"}
