"""kestrel serve: where its settings come from, and what it refuses before it loads a model."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from kestrel.cli import run_server
from kestrel.config import RuntimeConfig, flag_names
from kestrel.server.config import ServerConfig
from tests.cli.conftest import Kestrel
from tests.skills.model_profiles import golden_profile


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """The verb sets the log up for a process of its own."""
    logger = logging.getLogger("kestrel.server")
    before = (logger.handlers, logger.level, logger.propagate)
    yield
    logger.handlers, logger.level, logger.propagate = before


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ServerConfig, RuntimeConfig]]:
    """What the verb would have served with, in place of serving."""
    taken: list[tuple[ServerConfig, RuntimeConfig]] = []

    def note_down(server: ServerConfig, config: RuntimeConfig) -> None:
        taken.append((server, config))

    monkeypatch.setattr(run_server, "run_server", note_down)
    return taken


def test_no_flags_are_the_defaults(kestrel: Kestrel, seen: list[tuple[ServerConfig, RuntimeConfig]]) -> None:
    assert kestrel("serve").code == 0
    assert seen == [(ServerConfig(), RuntimeConfig())]
    assert (ServerConfig().host, ServerConfig().port) == ("127.0.0.1", 8080)


def test_the_documented_command_line_works(kestrel: Kestrel, seen: list[tuple[ServerConfig, RuntimeConfig]]) -> None:
    flags = "--weights . --device cpu --dtype bfloat16 --max-batch-size 64 --default-max-new-tokens 512"
    outcome = kestrel("serve", *flags.split(), "--host", "0.0.0.0", "--port", "8081", "--insecure")
    assert outcome.code == 0, outcome.err
    server, config = seen[0]
    assert server == ServerConfig(host="0.0.0.0", port=8081, insecure=True, default_max_new_tokens=512)
    assert config == RuntimeConfig(model_path=".", device="cpu", dtype="bfloat16", max_batch_size=64)


def test_a_flag_outranks_the_environment_the_file_and_the_default(
    kestrel: Kestrel,
    seen: list[tuple[ServerConfig, RuntimeConfig]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    file = tmp_path / "kestrel.yaml"
    file.write_text(
        "port: 1001\nqueue_timeout_s: 7\nmax_batch_size: 3\napi_keys: [one, two]\nenable_prefix_cache: false\n"
        "served_model_names: [house, home]\nroot_path:\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("KESTREL_PORT", "1002")
    monkeypatch.setenv("KESTREL_MAX_BATCH_SIZE", "4")
    assert kestrel("serve", "--config", file, "--port", "1003").code == 0
    assert kestrel("serve", "--config", file).code == 0
    monkeypatch.delenv("KESTREL_PORT")
    monkeypatch.setenv("KESTREL_CONFIG", str(file))
    assert kestrel("serve").code == 0
    assert [server.port for server, _ in seen] == [1003, 1002, 1001]
    server, config = seen[-1]
    assert (server.queue_timeout_s, server.api_keys) == (7.0, ("one", "two"))
    assert server.served_model_names == ("house", "home")
    assert (config.max_batch_size, config.enable_prefix_cache) == (4, False)
    assert server.root_path == ""


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("prot: 80", "prot: is not a setting"),
        ("5: 80", "5: is not a setting"),
        ("- port", "must map names to values"),
        ("port: [", "is not YAML"),
        ("port: 80.5", "'--port'"),
        ("port: eighty", "'--port'"),
        ("port: {a: 1}", "port: must be a single value"),
        ("api_keys: [[a]]", "api_keys: must be a single value"),
        ("port: 80\nport: 81", "'port' is given twice"),
        ("api_keys: 0123", "api_keys: is read as 83, not as text; put it in quotes"),
        ("api_keys: [good, yes]", "api_keys: is read as True, not as text"),
        ("served_model_names: 2", "served_model_names: is read as 2"),
        ("# " + "x" * 2**20 + "\nport: 80", "has more than 1048576 bytes"),
        ("port: 99999", "port: must be an integer from 0 to 65535"),
    ],
)
def test_a_wrong_file_is_refused_by_name(kestrel: Kestrel, tmp_path: Path, content: str, complaint: str) -> None:
    file = tmp_path / "kestrel.yaml"
    file.write_text(content, encoding="utf-8")
    outcome = kestrel("serve", "--config", file)
    assert outcome.code == 2
    assert complaint in outcome.err


def test_a_missing_file_is_refused(kestrel: Kestrel, tmp_path: Path) -> None:
    assert "cannot read" in kestrel("serve", "--config", tmp_path / "none.yaml").err


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.com"])
def test_a_public_address_without_a_key_is_refused(kestrel: Kestrel, host: str) -> None:
    outcome = kestrel("serve", "--host", host)
    assert outcome.code == 2
    assert "--api-key" in outcome.err
    assert "--insecure" in outcome.err


def test_keys_come_from_repeated_flags_or_the_environment(
    kestrel: Kestrel, seen: list[tuple[ServerConfig, RuntimeConfig]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kestrel("serve", "--host", "0.0.0.0", "--api-key", "a", "--api-key", "b").code == 0
    monkeypatch.setenv("KESTREL_API_KEY", "c d")
    assert kestrel("serve", "--host", "0.0.0.0").code == 0
    assert [server.api_keys for server, _ in seen] == [("a", "b"), ("c", "d")]


def test_help_names_every_flag(kestrel: Kestrel) -> None:
    printed = " ".join(kestrel("serve", "--help-all").out.split())
    for group in (ServerConfig, RuntimeConfig):
        for field in fields(group):
            assert all(flag in printed for flag in flag_names(field))
    assert "KESTREL_PORT for --port" in printed


def test_a_damaged_model_is_one_line_and_exit_code_3(kestrel: Kestrel, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    outcome = kestrel("serve", "--port", "0", "--model-path", tmp_path)
    assert outcome.code == 3
    assert outcome.err.startswith("error: ")
    assert len(outcome.err.splitlines()) == 1


def test_a_port_in_use_is_one_line(kestrel: Kestrel) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        outcome = kestrel("serve", "--port", str(taken.getsockname()[1]))
    assert outcome.code == 2
    assert "choose another --port" in outcome.err


def test_a_misspelt_key_of_the_file_gets_a_suggestion(kestrel: Kestrel, tmp_path: Path) -> None:
    path = tmp_path / "kestrel.yaml"
    path.write_text("max_bach_size: 4\n", encoding="utf-8")
    outcome = kestrel("serve", "--config", path)
    assert outcome.code == 2
    assert "did you mean 'max_batch_size'?" in outcome.err


def test_a_server_that_cannot_start_says_nothing_of_the_demonstration_model(kestrel: Kestrel) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        outcome = kestrel("serve", "--port", str(taken.getsockname()[1]))
    assert outcome.code == 2
    assert outcome.err.startswith("error: --port: cannot listen")


def test_a_process_of_its_own_is_refused_where_there_is_none(kestrel: Kestrel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kestrel.cli.run_server.can_compute_apart", lambda config: False)
    outcome = kestrel("serve", "--port", "0", "--compute-process", "own")
    assert outcome.code == 2
    assert outcome.err.startswith("error: --compute-process: 'own' works on a CPU under Linux only; use auto")


def test_a_refusal_names_the_flag_the_variable_or_the_key_that_gave_the_value(
    kestrel: Kestrel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("adapter_url_template: nonsense\n")
    assert kestrel("serve", "--config", file).err.startswith(f"error: {file}: adapter_url_template: must be a URL")
    monkeypatch.setenv("KESTREL_ADAPTER_URL_TEMPLATE", "nonsense")
    told = kestrel("serve", "--config", file).err
    assert told.startswith("error: KESTREL_ADAPTER_URL_TEMPLATE (adapter_url_template): must be a URL")
    told = kestrel("serve", "--config", file, "--adapter-url-template", "nonsense").err
    assert told.startswith("error: --adapter-url-template: must be a URL")
    monkeypatch.setenv("KESTREL_ADAPTER_URL_TEMPLATE", "https://example.org/{id}")
    monkeypatch.setenv("KESTREL_ATTENTION_BACKEND", "sdpa")
    told = kestrel("serve", "--quantization", "fp8").err
    assert told.startswith(
        "error: --quantization: 'fp8' runs on Triton kernels, which KESTREL_ATTENTION_BACKEND='sdpa'"
    )


def test_a_seed_of_the_server_repeats_its_draws() -> None:
    profile = golden_profile("md2")

    def seeds(given: int | None) -> list[int]:
        query = run_server.skills_of(given).get("query")
        requests = [query.parse({"question": "a", "settings": {"temperature": 1}}, profile) for _ in range(3)]
        return [request.sampling.seed for request in requests]

    assert seeds(7) == seeds(7) != seeds(8)
    assert len(set(seeds(7))) == 3
    assert seeds(None) != seeds(None)
