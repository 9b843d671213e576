"""Settings of an application that Ray starts by itself, by `serve run` or from a configuration file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kestrel.config import RuntimeConfig, environment_names
from kestrel.errors import ConfigError
from kestrel.integrations.cluster.config import (
    GROUPS,
    HAPROXY_VARIABLE,
    ClusterConfig,
    known_settings,
    settings_from,
)
from kestrel.server.config import ServerConfig
from kestrel.server.config_file import read_config_file

HELD_BY_RAY = ("host", "port", "ray_address")
"""Settings of a cluster that is there before the application."""
FILE_VARIABLE = "KESTREL_CONFIG"


def app_settings(
    args: Mapping[str, Any], environment: Mapping[str, str]
) -> tuple[ClusterConfig, ServerConfig, RuntimeConfig]:
    """What the arguments leave out is taken from the environment, which has a variable for each setting, and may name
    a file of them."""
    file = environment.get(FILE_VARIABLE)
    written = read_config_file(Path(file), GROUPS, FILE_VARIABLE) if file else {}
    variables = {
        name: environment[variable].split() if "tuple" in str(field.type) else environment[variable]
        for name, field in known_settings().items()
        for variable in reversed(environment_names(field))
        if environment.get(variable) and name not in HELD_BY_RAY  # which containers, and Kubernetes, set for others
    }
    given = {**written, **variables, **args}
    for name in HELD_BY_RAY:
        if name in given:
            raise ConfigError(
                name, "is for `kestrel cluster serve`; here Ray has its own, in http_options; leave it out"
            )
    cluster, server, config = settings_from(given)
    is_on, is_wanted = environment.get(HAPROXY_VARIABLE) == "1", cluster.haproxy is not False
    if is_on != is_wanted:
        change = f"{HAPROXY_VARIABLE}={int(is_wanted)}"
        raise ConfigError(
            "haproxy", f"is chosen where Ray is started: set {change} there, or haproxy: {str(is_on).lower()}"
        )
    if not server.has_keys and not server.insecure:
        remedy = f"set KESTREL_API_KEY, or api_keys in the file that {FILE_VARIABLE} names, or insecure"
        raise ConfigError("api_keys", f"are needed: only Ray knows on which addresses it listens; {remedy}")
    return cluster, server, config
