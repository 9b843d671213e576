"""Settings of a cluster: what is unknown, has no effect or would let anybody in is refused; Ray is optional."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import kestrel
from kestrel.cli.app import run
from kestrel.errors import ConfigError
from kestrel.integrations.cluster.app_settings import FILE_VARIABLE, HELD_BY_RAY, app_settings
from kestrel.integrations.cluster.config import (
    HAPROXY_VARIABLE,
    HELD_BY_THE_PROXY,
    require_room,
    settings_from,
    uses_haproxy,
)

OPEN = {"insecure": True}
STARTED = {HAPROXY_VARIABLE: "1"}


def test_texts_are_read_as_on_a_command_line() -> None:
    given = {
        "replicas": "3",
        "max_replicas": "4",
        "target_load": "0.5",
        "haproxy": "no",
        "api_keys": "k",
        "model": "moondream2",
        "seed": "4",
    }
    cluster, server, config = settings_from(given)
    assert (cluster.replicas, cluster.target_load, cluster.haproxy) == (3, 0.5, False)
    assert (server.api_keys, server.seed, config.model) == (("k",), 4, "moondream2")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"replicsa": 2}, "replicsa.*did you mean 'replicas'"),
        ({"replicas": "two"}, "replicas"),
        ({"replicas": 0}, "replicas"),
        ({"replicas": 4, "max_replicas": 2}, "max_replicas.*below"),
        ({"target_load": 0}, "target_load"),
        ({"target_load": 0.5}, "target_load.*max_replicas"),
        ({"scale_down_delay_s": 5.0}, "scale_down_delay_s.*max_replicas"),
        ({"max_requests_per_client": 5}, "max_requests_per_client.*api_keys"),
        ({"ray_address": "auto", "insecure": False}, "ray_address.*no API key"),
        ({"grpc_port": 9000}, "grpc_port"),
        ({"max_grpc_calls": 5}, "max_grpc_calls.*gRPC"),
        ({"stream_idle_timeout_s": 5}, "stream_idle_timeout_s.*gRPC"),
        ({"gpus_per_replica": 1, "tensor_parallel_size": 2}, "gpus_per_replica: 1 is too few.*2 processes"),
        ({"gpus_per_replica": 0, "device": "cuda"}, "gpus_per_replica: 0 is too few.*device: cpu"),
        ({"gpus_per_replica": 1.5}, "gpus_per_replica.*whole"),
        ({"compute_process": "own"}, "compute_process"),
        ({"port": 0}, "port"),
        ({"device": "cuda:1"}, "device"),
    ],
)
def test_what_cannot_work_is_refused_by_name(given: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        settings_from({**OPEN, **given})


@pytest.mark.parametrize(
    ("given", "resources", "named"),
    [
        ({}, {"CPU": 8}, "replicas: 1 with 1 GPUs each do not fit: Ray has found 0 GPUs; .*device: cpu"),
        ({"replicas": 4}, {"CPU": 8, "GPU": 1}, "replicas: 4 with 1 GPUs each do not fit: Ray has found 1 GPUs"),
        ({"replicas": 1, "max_replicas": 3}, {"CPU": 8, "GPU": 2}, "max_replicas: 3 with"),
        ({"replicas": 2, "tensor_parallel_size": 2}, {"CPU": 8, "GPU": 3}, "replicas: 2 with 2 GPUs"),
        ({"replicas": 3, "gpus_per_replica": 0.6}, {"CPU": 8, "GPU": 2}, "replicas: 3 with 0.6 GPUs"),
        ({"replicas": 4, "device": "cpu"}, {"CPU": 2}, "replicas: 4 with 1 cores .*found 2 cores; .*cpus_per_replica"),
    ],
)
def test_engines_for_which_ray_would_wait_without_end_are_refused(
    given: dict[str, object], resources: dict[str, float], named: str
) -> None:
    cluster, _, config = settings_from({**OPEN, **given})
    with pytest.raises(ConfigError, match=named):
        require_room(cluster, config, resources)


@pytest.mark.parametrize(
    ("given", "resources"),
    [
        ({"replicas": 4}, {"CPU": 4, "GPU": 4}),
        ({"replicas": 20, "gpus_per_replica": 0.1, "cpus_per_replica": 0.1}, {"CPU": 2, "GPU": 2}),
        ({"replicas": 9, "device": "cpu", "cpus_per_replica": 0}, {}),
    ],
)
def test_engines_that_fit_are_not_refused(given: dict[str, object], resources: dict[str, float]) -> None:
    cluster, _, config = settings_from({**OPEN, **given})
    require_room(cluster, config, resources)


def test_a_flag_about_haproxy_wins_over_the_variable_and_the_variable_over_the_default() -> None:
    for given, variable, is_on in (
        ({}, {}, True),
        ({}, {HAPROXY_VARIABLE: "0"}, False),
        ({"haproxy": True}, {HAPROXY_VARIABLE: "0"}, True),
        ({"haproxy": False}, {HAPROXY_VARIABLE: "1"}, False),
    ):
        assert uses_haproxy(settings_from({**OPEN, **given})[0], variable) is is_on


@pytest.mark.parametrize("name", HELD_BY_THE_PROXY)
def test_settings_of_connections_are_refused(name: str) -> None:
    value: object = {"tls_cert_file": "a.pem"}.get(name, 2000)
    beside = {"tls_key_file": "b.pem"} if name == "tls_cert_file" else {}
    with pytest.raises(ConfigError, match=f"{name}.*proxy"):
        settings_from({**OPEN, **beside, name: value})


@pytest.mark.parametrize("known_by", [{"trusted_proxies": ["127.0.0.1"]}, {"haproxy": False}, {"api_keys": ["k"]}])
def test_clients_that_can_be_told_apart_may_have_a_limit_each(known_by: dict[str, object]) -> None:
    assert settings_from({**OPEN, "max_requests_per_client": 5, **known_by})[1].max_requests_per_client == 5


def test_what_an_application_of_ray_is_not_told_comes_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "kestrel.yaml"
    file.write_text("api_keys: [from-file]\nmodel: moondream2\nmax_batch_size: 4\nreplicas: 7\n")
    around = {**STARTED, FILE_VARIABLE: str(file), "KESTREL_MAX_BATCH_SIZE": "5", "KESTREL_REPLICAS": "8"}
    cluster, server, config = app_settings({"replicas": 9}, around)
    assert (server.api_keys, config.model, config.max_batch_size) == (("from-file",), "moondream2", 5)
    assert cluster.replicas == 9
    assert app_settings({}, {**around, "KESTREL_API_KEY": "one two"})[1].api_keys == ("one", "two")
    assert app_settings({}, {**around, "KESTREL_API_KEYS": "one two"})[1].api_keys == ("one", "two")
    assert "from-file" not in repr(server)


@pytest.mark.parametrize("name", HELD_BY_RAY)
def test_an_application_of_ray_leaves_to_ray_what_ray_decides(name: str) -> None:
    around = {**STARTED, "KESTREL_API_KEY": "k", f"KESTREL_{name.upper()}": "tcp://10.0.0.1:80"}
    app_settings({}, around)
    with pytest.raises(ConfigError, match=f"{name}.*http_options"):
        app_settings({name: "1"}, around)


@pytest.mark.parametrize(
    ("args", "around", "named"),
    [
        ({}, STARTED, "api_keys.*KESTREL_API_KEY.*KESTREL_CONFIG"),
        ({"haproxy": False}, {}, "api_keys.*KESTREL_API_KEY.*KESTREL_CONFIG"),
        ({"api_keys": ["k"]}, {}, f"haproxy.*{HAPROXY_VARIABLE}=1.*haproxy: false"),
        ({"api_keys": ["k"], "haproxy": False}, STARTED, f"haproxy.*{HAPROXY_VARIABLE}=0.*haproxy: true"),
        (OPEN, {**STARTED, FILE_VARIABLE: "/nowhere.yaml"}, "KESTREL_CONFIG.*/nowhere.yaml"),
        (OPEN, {**STARTED, "KESTREL_MAX_BATCH_SIZE": "many"}, "max_batch_size.*'many'"),
    ],
)
def test_an_application_of_ray_says_what_it_misses(args: dict[str, object], around: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        app_settings(args, around)


def test_without_ray_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "kestrel.integrations.ray", raising=False)
    file = tmp_path / "cluster.yaml"
    file.write_text("replicas: 2\napi_keys: [k]\n")
    assert run(["cluster", "serve", "-c", str(file)]) != 0
    assert ".[ray]" in capsys.readouterr().err
    file.write_text("replicsa: 2\n")
    assert run(["cluster", "serve", "-c", str(file)]) != 0
    assert "replicsa: is not a setting" in capsys.readouterr().err


def test_only_the_integrations_of_ray_import_it() -> None:
    root = Path(kestrel.__file__).parent
    importing = re.compile(r"^\s*(import|from) ray\b", re.MULTILINE)
    found = [path.relative_to(root).as_posix() for path in root.rglob("*.py") if importing.search(path.read_text())]
    assert [path for path in found if not path.startswith("integrations/ray")] == []
    assert "integrations/ray.py" in found
