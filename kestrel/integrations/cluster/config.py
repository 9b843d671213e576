"""Settings of a cluster: frozen, inert data. Neither Ray nor torch is needed to read them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from typing import Any

from kestrel.config import TRUTHS, RuntimeConfig, flag_names, setting
from kestrel.errors import ConfigError, did_you_mean, shown
from kestrel.server.config import ServerConfig


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """How many engines there are and where they run. Every field is also a flag of `kestrel cluster serve`."""

    replicas: int = setting(
        1, "Number of engines; with --max-replicas the smallest number.", group="Cluster", common=True
    )
    max_replicas: int | None = setting(
        None, "Largest number of engines: more are started under load. Default: as --replicas.", common=True
    )
    target_load: float = setting(
        0.7,
        "Share of its rows, or of its KV pages, that an engine should use: above it more engines are started.",
    )
    scale_up_delay_s: float = setting(30.0, "Seconds of more load before more engines are started.")
    scale_down_delay_s: float = setting(600.0, "Seconds of less load before engines are ended.")
    gpus_per_replica: float | None = setting(
        None, "GPUs of each engine. Default: as many as its model has processes, and 0 with --device cpu."
    )
    cpus_per_replica: float = setting(1.0, "Cores that Ray reserves for each engine; 0: none.")
    ingress_replicas: int = setting(
        1, "Number of HTTP servers. Each has its own limits per client and stored responses."
    )
    haproxy: bool | None = setting(
        None,
        "HAProxy accepts connections. Without it Ray Serve's own, slower proxy does. Default: HAProxy, unless "
        "RAY_SERVE_ENABLE_HA_PROXY is 0.",
    )
    ray_address: str | None = setting(
        None,
        "Ray cluster to join, or auto; it needs an API key, or --insecure. Default: a new one on this machine, which "
        "ends with this program.",
    )
    health_check_period_s: float = setting(5.0, "Seconds between two checks of each engine.")

    def __post_init__(self) -> None:
        for name, low, high in (("replicas", 1, 10_000), ("max_replicas", 1, 10_000), ("ingress_replicas", 1, 1000)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not low <= value <= high):
                raise ConfigError(name, f"must be an integer from {low} to {high} (got {shown(value)})")
        for name, low, high in (
            ("target_load", 0.01, 100.0),
            ("scale_up_delay_s", 0.0, 86_400.0),
            ("scale_down_delay_s", 0.0, 86_400.0),
            ("gpus_per_replica", 0.0, 64.0),
            ("cpus_per_replica", 0.0, 4096.0),
            ("health_check_period_s", 0.1, 3600.0),
        ):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and (not is_number or not low <= value <= high):
                raise ConfigError(name, f"must be a number from {low:g} to {high:g} (got {shown(value)})")
        gpus = self.gpus_per_replica
        if gpus is not None and gpus > 1 and gpus != int(gpus):
            raise ConfigError("gpus_per_replica", f"must be a whole number above 1 (got {gpus:g}): Ray divides one GPU")
        for field in fields(self):
            if field.name in OF_SCALING and self.max_replicas is None and getattr(self, field.name) != field.default:
                raise ConfigError(field.name, "has an effect with max_replicas only; set that too, or leave it out")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ConfigError("max_replicas", f"{self.max_replicas} is below replicas ({self.replicas}); raise it")


OF_SCALING = ("target_load", "scale_up_delay_s", "scale_down_delay_s")
HAPROXY_VARIABLE = "RAY_SERVE_ENABLE_HA_PROXY"
"""By which Ray is told, when it is imported and when its processes start."""
HELD_BY_THE_PROXY = (
    "tls_cert_file", "send_timeout_s", "keep_alive_timeout_s", "max_connections", "max_header_bytes",
)  # fmt: skip
"""Settings of connections, which are not the server's in a cluster."""
OF_GRPC = ("grpc_port", "max_grpc_calls", "stream_idle_timeout_s")


def require_fitting(cluster: ClusterConfig, server: ServerConfig, config: RuntimeConfig) -> None:
    """Refuse what has no effect in a cluster, and an ingress that anybody could use."""
    for field in fields(server):
        if field.name in HELD_BY_THE_PROXY and getattr(server, field.name) != field.default:
            raise ConfigError(field.name, "is for connections, which Ray's proxy handles in a cluster; leave it out")
        if field.name in OF_GRPC and getattr(server, field.name) != field.default:
            raise ConfigError(field.name, "is for gRPC, which only `kestrel serve` has; leave it out")
    for name, value, reason in (
        ("compute_process", server.compute_process != "auto", "is of `kestrel serve`; each engine has a process here"),
        ("port", server.port == 0, "must be given: Ray takes no free one by itself"),
    ):
        if value:
            raise ConfigError(name, reason if name == "port" else f"{reason}; leave it out")
    if cluster.ray_address is not None and not server.has_keys and not server.insecure:
        reason = "is a cluster whose Serve may listen on all addresses, and no API key is set"
        raise ConfigError("ray_address", f"{reason}; set api_keys, or insecure")
    knows_clients = server.has_keys or server.trusted_proxies or cluster.haproxy is False
    if server.max_requests_per_client is not None and not knows_clients:
        reason = "counts by address where there are no keys, and HAProxy hides the addresses"
        raise ConfigError("max_requests_per_client", f"{reason}; set api_keys, or trusted_proxies, or haproxy: false")
    refuse_named_gpu(config)
    gpus, num_processes = gpus_of_engine(cluster, config), config.tensor_parallel_size
    is_enough = gpus >= num_processes if num_processes > 1 else gpus > 0  # several engines may share one
    if config.device != "cpu" and not is_enough:
        reason = f"{gpus:g} is too few for an engine of {num_processes} processes with a GPU each"
        raise ConfigError("gpus_per_replica", f"{reason}; leave it out, or use device: cpu")


def refuse_named_gpu(config: RuntimeConfig) -> None:
    if config.device.startswith("cuda:"):
        raise ConfigError("device", "names one GPU, and Ray gives each engine its own; use cuda or auto")


def uses_haproxy(cluster: ClusterConfig, environment: Mapping[str, str]) -> bool:
    """In a cluster that is started with this environment."""
    return environment.get(HAPROXY_VARIABLE, "1") == "1" if cluster.haproxy is None else cluster.haproxy


def gpus_of_engine(cluster: ClusterConfig, config: RuntimeConfig) -> float:
    if cluster.gpus_per_replica is not None:
        return cluster.gpus_per_replica
    return gpus_per_engine(config)


def require_room(cluster: ClusterConfig, config: RuntimeConfig, resources: Mapping[str, float]) -> None:
    """Refuse more engines than Ray has room for: it would wait without a word. `resources` are Ray's, by its names."""
    name = "replicas" if cluster.max_replicas is None else "max_replicas"
    number = getattr(cluster, name)
    for resource, kind, each, remedy in (
        ("GPU", "GPUs", gpus_of_engine(cluster, config), "lower it, or use device: cpu"),
        ("CPU", "cores", cluster.cpus_per_replica, "lower it, or cpus_per_replica"),
    ):
        found = resources.get(resource, 0.0)
        if number > _num_fitting(each, found, divides=resource == "GPU"):
            reason = f"{number} with {each:g} {kind} each do not fit: Ray has found {found:g} {kind}"
            raise ConfigError(name, f"{reason}; {remedy}")


def _num_fitting(each: float, found: float, *, divides: bool) -> float:
    """`divides`: no part of one is taken from two."""
    if each == 0:
        return math.inf
    if divides and each < 1:
        return found * math.floor(1 / each + 1e-9)
    return math.floor(found / each + 1e-9)


def gpus_per_engine(config: RuntimeConfig) -> int:
    """What Ray reserves: one for each process of its model, none on a CPU."""
    return 0 if config.device == "cpu" else config.tensor_parallel_size


GROUPS = (ClusterConfig, ServerConfig, RuntimeConfig)


def known_settings() -> dict[str, Field[Any]]:
    return {field.name: field for group in GROUPS for field in fields(group) if flag_names(field)}


def settings_from(given: Mapping[str, Any]) -> tuple[ClusterConfig, ServerConfig, RuntimeConfig]:
    """All settings from one mapping, by the names of their fields. Texts are read as a command line has them."""
    known = known_settings()
    for name in given:
        if name not in known:
            close = did_you_mean(name, known)
            raise ConfigError(str(name), f"is not a setting; known ones: {', '.join(sorted(known))}{close}")
    values = {name: _typed(name, str(known[name].type), value) for name, value in given.items()}
    cluster, server, config = (
        {field.name: values[field.name] for field in fields(group) if field.name in values} for group in GROUPS
    )
    made = ClusterConfig(**cluster), ServerConfig(**server), RuntimeConfig(**config)
    require_fitting(*made)
    return made


def _typed(name: str, kind: str, value: Any) -> Any:
    kind = kind.removesuffix(" | None")
    if kind.startswith("tuple"):
        return tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if not isinstance(value, str):
        return float(value) if kind == "float" and type(value) is int else value
    try:
        if kind in ("int", "float"):
            return int(value) if kind == "int" else float(value)
        return TRUTHS[value.lower()] if kind == "bool" else value
    except (ValueError, KeyError):
        raise ConfigError(
            name, f"must be {'true or false' if kind == 'bool' else 'a number'} (got {shown(value)})"
        ) from None
