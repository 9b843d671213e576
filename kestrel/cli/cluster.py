"""kestrel cluster: verbs for several engines behind one address."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kestrel.cli.config_flags import add_verb, verb_group, with_flags
from kestrel.cli.console import note
from kestrel.cli.serve import config_option
from kestrel.config import RuntimeConfig
from kestrel.integrations.cluster.config import HAPROXY_VARIABLE, ClusterConfig, require_fitting, uses_haproxy
from kestrel.known_models import check_source
from kestrel.server.config import ServerConfig


def make_group() -> typer.Typer:
    group = verb_group("Serve a model from several GPUs.")
    add_verb(group, "serve", serve)
    return group


@with_flags
def serve(
    config_file: Annotated[Path | None, config_option(ClusterConfig, ServerConfig, RuntimeConfig)] = None,
    *,
    cluster: ClusterConfig,
    server: ServerConfig,
    config: RuntimeConfig,
) -> None:
    """Serve a model over HTTP from several engines, with Ray Serve.

    kestrel cluster serve --model moondream2 --replicas 4 --api-key KEY

    Routes, keys and limits are the same as with `kestrel serve`. Questions about a cached picture or prompt go to the
    engine that has it. If an engine is lost, its requests continue in another one.

    After SIGTERM or Ctrl-C accepted requests may finish.
    """
    check_source(config)
    require_fitting(cluster, server, config)
    # Others need neither Ray nor torch, which these import.
    from kestrel.integrations.ray_data import require_ray  # noqa: PLC0415

    require_ray("cluster", ("ray",))
    os.environ[HAPROXY_VARIABLE] = str(int(uses_haproxy(cluster, os.environ)))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from kestrel.integrations.ray import run_cluster  # noqa: PLC0415

    run_cluster(cluster, server, config, note)
