"""The server's configuration: what it refuses, and the socket it leads to."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from kestrel.errors import ConfigError
from kestrel.server.config import ServerConfig
from kestrel.server.http import create_app
from kestrel.server.lifecycle import address_of, bind
from tests.server.conftest import runtime_config, start_server


@pytest.mark.parametrize(
    "change",
    [
        {"port": -1},
        {"port": 65_536},
        {"port": True},
        {"port": "80"},
        {"host": ""},
        {"host": "not a host"},
        {"host": 5},
        {"api_keys": "secret"},
        {"api_keys": ("",)},
        {"api_keys": ("two words",)},
        {"api_keys": ("schlüssel",)},
        {"urgent_api_keys": ("two words",)},
        {"max_body_bytes": 0},
        {"request_timeout_s": 0},
        {"request_timeout_s": float("nan")},
        {"queue_timeout_s": float("inf")},
        {"drain_timeout_s": None},
        {"max_requests_per_client": 0},
        {"default_max_new_tokens": 0},
        {"log_format": "xml"},
        {"log_level": "loud"},
        {"access_log": 1},
        {"seed": -1},
        {"compute_process": "both"},
        {"tls_cert_file": "cert.pem"},
        {"tls_key_file": "key.pem"},
        {"trusted_proxies": ("*",)},
        {"trusted_proxies": ("proxy.example",)},
        {"trusted_proxies": ("10.0.0.1/8",)},
        {"trusted_proxies": "10.0.0.1"},
        {"root_path": "vision"},
        {"root_path": "/vision/"},
        {"served_model_names": (" ",)},
        {"insecure": 1},
        {"isolate_prefix_cache": True},
        {"cors_origins": ("app.example",)},
        {"cors_origins": ("https://app.example/",)},
        {"otlp_endpoint": "collector:4318"},
    ],
)
def test_a_value_that_cannot_work_names_its_field(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refusal:
        ServerConfig(**change)
    named = {"tls_cert_file": "tls_key_file", "tls_key_file": "tls_cert_file"}
    field = next(iter(change))
    assert refusal.value.field == named.get(field, field)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
def test_loopback_needs_no_key(host: str) -> None:
    assert ServerConfig(host=host).is_loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "fe80::1", "kestrel.internal", "2130706433"])
def test_every_other_address_needs_a_key_or_a_word(host: str) -> None:
    with pytest.raises(ConfigError, match="no API key"):
        ServerConfig(host=host)
    assert not ServerConfig(host=host, api_keys=("key",)).is_loopback
    assert not ServerConfig(host=host, urgent_api_keys=("key",)).is_loopback
    assert ServerConfig(host=host, insecure=True).host == host


def test_keys_are_not_printed() -> None:
    assert "secret" not in repr(ServerConfig(api_keys=("secret",), urgent_api_keys=("secret",)))


def test_a_host_for_pictures_that_is_none_is_refused_at_the_start() -> None:
    async def factory() -> Any:
        raise AssertionError("not reached")

    with pytest.raises(ConfigError, match="allowed_image_hosts"):
        create_app(factory, ServerConfig(allowed_image_hosts=("https://example.com/",)))


def test_the_socket_says_tcp_so_that_small_writes_are_sent_at_once() -> None:
    """Without it asyncio leaves Nagle's algorithm on, and every answer waits 40 ms for an acknowledgement."""
    with bind(ServerConfig(port=0)) as listening:
        assert listening.proto == socket.IPPROTO_TCP
        assert address_of(listening, ServerConfig()) == f"http://127.0.0.1:{listening.getsockname()[1]}/"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_https_is_served_with_the_given_certificate_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, *subject]
    subprocess.run(command, check=True, capture_output=True)
    config = ServerConfig(port=0, tls_cert_file=str(cert), tls_key_file=str(key))
    for running in start_server(config, runtime_config()):
        trusting = ssl.create_default_context(cafile=str(cert))
        url = running.url.replace("http://", "https://")
        assert httpx.get(f"{url}/ready", verify=trusting).status_code == 200
    key.write_text("nonsense", encoding="utf-8")
    with pytest.raises(ConfigError, match="tls_cert_file"):
        next(start_server(config, runtime_config()))


def test_a_taken_port_is_refused_with_a_remedy() -> None:
    with bind(ServerConfig(port=0)) as taken, pytest.raises(ConfigError, match="choose another --port"):
        bind(ServerConfig(port=taken.getsockname()[1]))
