"""Whether a manifest's containers fit the server: flags, variables, ports, probes, and the time to end."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any
from unittest.mock import AsyncMock

import typer

from kestrel.cli.config_flags import add_verb
from kestrel.cli.serve import serve
from kestrel.config import RuntimeConfig, environment_names
from kestrel.server.config import ServerConfig
from kestrel.server.http import create_app
from tests.deploy.custom_resources import pod_specs

CLOSING_S = 5
"""What the server takes after the drain time to close its connections."""
VARIABLES = {
    name for group in (RuntimeConfig, ServerConfig) for field in fields(group) for name in environment_names(field)
}


@cache
def served_paths() -> set[str]:
    return set(create_app(AsyncMock()).openapi()["paths"])


def parsed(arguments: list[str], source: str = "COMMANDLINE") -> dict[str, Any]:
    """What they give, or the environment, read by the command line's own table of options."""
    app = typer.Typer()
    add_verb(app, "serve", serve)
    with typer.main.get_command(app).make_context("serve", list(arguments)) as context:
        return {name: value for name, value in context.params.items() if is_given(context, name, source)}


def is_given(context: Any, name: str, by: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == by


def require_servers_fit(manifest: dict[str, Any]) -> int:
    """How many containers of it run `kestrel serve`; all of them fit."""
    num_servers = 0
    for pod in pod_specs(manifest):
        for container in pod["containers"]:
            if container.get("args", [""])[0] == "serve":
                _require_fits(container, pod)
                num_servers += 1
    return num_servers


def _require_fits(container: dict[str, Any], pod: dict[str, Any]) -> None:
    given = {variable["name"]: variable["value"] for variable in container["env"]}
    assert len(given) == len(container["env"])
    assert given.keys() <= VARIABLES | {"KESTREL_CONFIG"}
    flags = parsed(container["args"][1:])
    (port,) = container["ports"]
    assert int(flags.get("port") or given["KESTREL_PORT"]) == port["containerPort"]
    assert (flags.get("host") or given["KESTREL_HOST"]) == "0.0.0.0"
    for kind in ("startup", "readiness", "liveness"):
        asked = container[f"{kind}Probe"]["httpGet"]
        assert asked["path"] in served_paths()
        assert asked["port"] in (port["name"], port["containerPort"])
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    command, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    needed_s = int(seconds) + float(flags.get("drain_timeout_s") or given["KESTREL_DRAIN_TIMEOUT_S"]) + CLOSING_S
    assert needed_s < pod["terminationGracePeriodSeconds"] <= needed_s + 30
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    if "KESTREL_CONFIG" in given:
        assert given["KESTREL_CONFIG"] == "/etc/kestrel/kestrel.yaml"
