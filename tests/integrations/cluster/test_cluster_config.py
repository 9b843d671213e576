"""Settings of a cluster: what is unknown, has no effect or would let anybody in is refused; Ray is optional."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import kestrel
from kestrel.cli.app import run
from kestrel.errors import ConfigError
from kestrel.integrations.cluster.config import HELD_BY_THE_PROXY, settings_from

OPEN = {"insecure": True}


def test_texts_are_read_as_on_a_command_line() -> None:
    given = {
        "replicas": "3",
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
        ({"haproxy": True, "insecure": False}, "haproxy.*no API key"),
        ({"grpc_port": 9000}, "grpc_port"),
        ({"compute_process": "own"}, "compute_process"),
        ({"port": 0}, "port"),
        ({"device": "cuda:1"}, "device"),
    ],
)
def test_what_cannot_work_is_refused_by_name(given: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        settings_from({**OPEN, **given})


@pytest.mark.parametrize("name", HELD_BY_THE_PROXY)
def test_settings_of_connections_are_refused(name: str) -> None:
    value: object = {"tls_cert_file": "a.pem", "trusted_proxies": ["10.0.0.1"]}.get(name, 2000)
    beside = {"tls_key_file": "b.pem"} if name == "tls_cert_file" else {}
    with pytest.raises(ConfigError, match=f"{name}.*proxy"):
        settings_from({**OPEN, **beside, name: value})


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
