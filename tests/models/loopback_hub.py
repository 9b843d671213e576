"""A small hub on the loopback, for huggingface_hub itself to talk to."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

OLD, NEW, OTHER = "a" * 40, "b" * 40, "c" * 40


@dataclass
class Hub:
    """Of repositories that are not in `published`, every file of every commit holds the commit's name."""

    names: dict[str, str] = field(default_factory=lambda: {"main": OLD, "v2": OTHER})
    published: dict[str, Mapping[str, bytes]] = field(default_factory=dict)
    errors: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Status and error code of repositories that are not open to everybody."""
    asked: list[str] = field(default_factory=list)
    is_down: bool = False

    def commit(self, revision: str) -> str | None:
        return revision if revision in (OLD, NEW, OTHER) else self.names.get(revision)

    def files_asked(self) -> set[str]:
        return {path.rsplit("/", 1)[1] for path in self.asked if "/resolve/" in path}

    def answer(self, path: str) -> tuple[int, str, str | None, bytes]:
        """Status, error code, commit and body."""
        parts = path.split("?")[0].split("/")
        if len(parts) < 6:
            return 404, "", None, b""  # what the library asks beside models
        is_api = parts[1] == "api"
        repo, revision = ("/".join(parts[3:5]), parts[6]) if is_api else ("/".join(parts[1:3]), parts[4])
        if repo in self.errors:
            return *self.errors[repo], None, b""
        commit = self.commit(revision)
        if commit is None:
            return 404, "RevisionNotFound", None, b""
        if is_api:
            return 200, "", commit, json.dumps({"id": repo, "sha": commit, "siblings": []}).encode()
        if repo not in self.published:
            return 200, "", commit, commit.encode()
        body = self.published[repo].get("/".join(parts[5:]))
        return (404, "EntryNotFound", commit, b"") if body is None else (200, "", commit, body)


@contextmanager
def running_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            hub.asked.append(self.path)
            status, code, commit, body = (500, "", None, b"") if hub.is_down else hub.answer(self.path)
            self.send_response(status)
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.send_header("Content-Length", str(len(body)))
            for name, value in (("X-Error-Code", code), ("X-Repo-Commit", commit)):
                if value:
                    self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    yield hub
    server.shutdown()
    thread.join()
    server.server_close()
