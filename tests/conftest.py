"""For all tests: which cases run, threads of workers side by side and of programs they start, garbage, and which files
come first."""

from __future__ import annotations

import gc
import importlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

LONG = (
    "tests/server/playground/",
    "tests/train/adapter/",
    "tests/server/test_draining",
    "tests/server/test_server_process",
)
"""Begun first, since a file is one worker's: at the end the other one would wait for it."""
TOGETHER = {
    "a browser": ("tests/server/playground/",),
    "programs to fork": (
        "tests/cli/test_cli_batch",
        "tests/cli/test_cli_chat",
        "tests/cli/test_cli_label",
        "tests/cli/test_cli_program",
        "tests/engine/test_compute_process",
        "tests/integrations/",
        "tests/parallel/test_rank_",
        "tests/server/test_connections",
        "tests/server/test_draining",
        "tests/server/test_hostile_formats",
        "tests/server/test_large_pictures",
        "tests/server/test_server_memory",
        "tests/server/test_server_process",
        "tests/test_document_blocks",
    ),
    "transformers": ("tests/layers/", "tests/llama/", "tests/models/gguf/"),
    "golden models": ("tests/moondream/", "tests/runtime/"),
    "an optimiser": ("tests/cli/test_cli_train", "tests/test_examples", "tests/train/"),
}
"""Files that one worker runs, by what it starts, imports or computes once for them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run all cases of sweeps, and long random runs")


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin("hypothesispytest"):
        import hypothesis  # noqa: PLC0415 - a machine for the GPU tests alone may lack it

        # How long an example takes is the machine's. A run tries the same examples as the one before, so that a change
        # is refused for what it changed; `--hypothesis-seed=$RANDOM` tries others.
        too_slow = hypothesis.HealthCheck.too_slow
        is_same = config.getoption("--hypothesis-seed", None) is None
        hypothesis.settings.register_profile(
            "kestrel", deadline=None, suppress_health_check=[too_slow], derandomize=is_same
        )
        hypothesis.settings.load_profile("kestrel")
    # Where this is set, each program that a test starts would compile the package anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # A client reads all certificates it may trust when it is made. Nobody here talks to the outside: one is enough.
    os.environ["SSL_CERT_FILE"] = str(Path(__file__).with_name("authority.pem"))
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"
    gc.disable()  # until all tests are found: what they import stays, and looking for garbage there takes seconds
    config.add_cleanup(gc.unfreeze)  # else modules that count their objects complain about them at the end


class SharingFiles(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        groups = (group for group, starts in TOGETHER.items() if nodeid.startswith(starts))
        return next(groups, super()._split_scope(nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SharingFiles:
    return SharingFiles(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Workers import the same files, and each begins at another one: a fresh checkout is compiled once, not by each."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if not worker or session.config.args != session.config.getini("testpaths"):
        return
    files = sorted(Path(__file__).parent.rglob("test_*.py"))
    start = int(worker.removeprefix("gw")) * len(files) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    for file in (*files[start:], *files[:start]):
        with suppress(Exception, pytest.skip.Exception):  # which collecting it reports
            importlib.import_module(".".join(file.relative_to(session.config.rootpath).with_suffix("").parts))


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported: a full collection would look at it for half a second
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--exhaustive"):
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        items[:] = [item for item in items if item.get_closest_marker("exhaustive") is None]
        config.hook.pytest_deselected(items=left_out)
    items.sort(key=lambda item: next((i for i, start in enumerate(LONG) if item.nodeid.startswith(start)), len(LONG)))


def downloaded(variable: str, name: str, script: str) -> Path:
    """What a script has put into the user's cache folder, or where a variable says that it is."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(os.environ.get(variable) or Path(cache, "kestrel", name))
    if not path.exists():
        pytest.skip(f"{path} does not exist; run scripts/{script}, or set {variable}")
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """A real small text model: SmolLM2-135M-Instruct as a .gguf file."""
    return downloaded("KESTREL_SMOLLM2", "models/SmolLM2-135M-Instruct.Q4_1.gguf", "install-smollm2")


@pytest.fixture(scope="session")
def vocabularies() -> Path:
    """A folder of published vocabularies with texts and their ids; its folder `templates` holds chat templates."""
    return downloaded("KESTREL_VOCABULARIES", "vocabularies", "install-vocabularies")
