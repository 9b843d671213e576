"""Server configuration: frozen, inert data. Nothing is bound, read or resolved here."""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import dataclass, fields

from kestrel.config import setting
from kestrel.errors import ConfigError, shown

LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
COMPUTE_PROCESSES = ("auto", "own", "shared")
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s*]+")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How one program serves one engine over HTTP. Every field is also a flag of `kestrel serve`."""

    host: str = setting(
        "127.0.0.1", "Address to listen on. A public one needs an API key.", group="Address and access", common=True
    )
    port: int = setting(8080, "Port to listen on; 0 takes a free one.", common=True)
    grpc_port: int | None = setting(
        None, "Port for the KServe v2 / Triton protocol over gRPC; needs the extra grpc. Default: none."
    )
    api_keys: tuple[str, ...] = setting(
        (),
        "A key that clients must send. Repeatable: each of the keys is accepted.",
        flags=("--api-key",),
        metavar="KEY",
        is_shown=False,
        common=True,
    )
    urgent_api_keys: tuple[str, ...] = setting(
        (),
        "A key that is accepted too, and whose requests may have a priority below 0. Repeatable. Default: none.",
        flags=("--urgent-api-key",),
        metavar="KEY",
        is_shown=False,
    )
    insecure: bool = setting(False, "Listen on a public address without any key.", flags=("--insecure",))
    metrics_open: bool = setting(False, "Answer /metrics without a key.", flags=("--metrics-open",))
    tls_cert_file: str | None = setting(None, "Certificate chain (PEM) to serve HTTPS.")
    tls_key_file: str | None = setting(None, "Private key (PEM) of the certificate.")
    root_path: str = setting("", "Path under which a proxy shows this server, such as /vision.")
    trusted_proxies: tuple[str, ...] = setting(
        (),
        "Address or network (10.0.0.0/8) of a proxy whose X-Forwarded-For and -Proto are trusted. Repeatable. "
        "Default: none.",
        flags=("--trusted-proxy",),
        metavar="ADDRESS",
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        "A web origin whose pages may call this server, or *. Repeatable.",
        flags=("--cors-origin",),
        metavar="ORIGIN",
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "A host name that clients use for this server, in addition to its address and localhost; * for any name. "
        "Repeatable. Default: any name with a key or --insecure, otherwise none.",
        flags=("--allowed-host",),
        metavar="NAME",
    )
    served_model_names: tuple[str, ...] = setting(
        (),
        "Another name that clients may use for the model. Repeatable; answers show the first one.",
        flags=("--served-model-name",),
        metavar="NAME",
        group="Requests",
        common=True,
    )
    default_max_new_tokens: int | None = setting(
        None, "Longest answer in tokens if a request gives no limit. Default: the model's own limit."
    )
    max_body_bytes: int = setting(32 * 2**20, "Largest request body in bytes.")
    max_body_values: int = setting(
        2**19,
        "Most values in a large body, weighted by what they cost to read: a number counts 1, a text 4, an object 8, "
        "a list 12, a key 14. An escape in a text counts 0.5, and so does every fourth byte outside of long plain "
        "texts.",
    )
    max_logprobs: int = setting(
        2**20,
        "Most log-probabilities in one answer, over all its prompts and likely tokens. "
        "One prompt of full length may always have all of its log-probabilities.",
    )
    max_header_bytes: int = setting(64 * 2**10, "Largest request line with headers, in bytes.")
    max_pending_body_bytes: int = setting(
        2**30, "Most bytes in bodies of unanswered requests, with fetched pictures; further requests are refused."
    )
    receive_timeout_s: float = setting(
        60.0, "Seconds a client may take to send a request.", group="Connections and time limits"
    )
    send_timeout_s: float = setting(60.0, "Seconds a client may take to read a complete answer.")
    request_timeout_s: float = setting(
        600.0, "Seconds a request may take after it was received, with all its pictures, prompts and choices."
    )
    queue_timeout_s: float = setting(
        120.0, "Seconds until the first step of a request must begin, with the time to fetch pictures and adapters."
    )
    step_timeout_s: float = setting(
        300.0,
        "If no step ends for this many seconds while requests wait, the model is considered hung and the server ends "
        "with exit code 1. After a tenth of this time the server is not ready.",
    )
    drain_timeout_s: float = setting(30.0, "Seconds that accepted requests get to finish after SIGTERM.")
    keep_alive_timeout_s: int = setting(65, "Seconds an idle connection stays open.")
    max_connections: int | None = setting(
        None, "Most open HTTP connections. Default: 4096, or fewer if the limit of open files is low."
    )
    ping_interval_s: float = setting(15.0, "Seconds of silence in a stream after which a comment keeps it open.")
    max_grpc_calls: int = setting(
        1024, "Most gRPC calls with a key at the same time, with open streams. One client may have a quarter of them."
    )
    stream_idle_timeout_s: float = setting(
        600.0, "Seconds a gRPC stream may wait for its next request while none of its requests runs."
    )
    max_requests_per_client: int | None = setting(
        None,
        "Most unanswered requests of one key, or of one address; each prompt, choice and input counts. "
        "Default: no limit.",
    )
    allowed_image_hosts: tuple[str, ...] = setting(
        (),
        "A host from which http(s) image URLs may be fetched. Repeatable. Default: none.",
        flags=("--allowed-image-host",),
        metavar="HOST",
        group="Pictures",
    )
    max_image_fetches: int = setting(16, "Pictures that are fetched from image URLs at the same time.")
    max_stored_responses: int = setting(
        1024, "Responses of /v1/responses kept in memory for the clients that asked for them; 0 for none."
    )
    max_stored_response_bytes: int = setting(
        256 * 2**20, "Memory for these responses and their conversations, in bytes; the oldest are dropped."
    )
    isolate_prefix_cache: bool = setting(
        False, "Share cached pictures and prompts only between requests of the same key.", group="Batches and KV cache"
    )
    seed: int | None = setting(
        None,
        "Requests without a seed get one that is derived from this seed, so that a run can be repeated. Default: "
        "random.",
        group="Requests",
    )
    log_format: str = setting("text", "How requests are logged: text or json.", group="Log and process")
    log_level: str = setting("info", "What is logged: debug, info, warning or error; each includes those after it.")
    access_log: bool = setting(True, "Log a line for every request.")
    compute_process: str = setting(
        "auto",
        "Where the model runs: own (a separate process) or shared (with HTTP). auto: own on a CPU under Linux.",
    )
    otlp_endpoint: str | None = setting(
        None, "Address that OpenTelemetry spans are sent to over HTTP; needs the extra otel."
    )

    def __post_init__(self) -> None:
        _check_texts(self)
        _check_numbers(self)
        _check_exposure(self)
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ConfigError(name, f"{shown(getattr(self, name))} is not known; use one of: {', '.join(known)}")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            missing = "tls_key_file" if self.tls_key_file is None else "tls_cert_file"
            raise ConfigError(missing, "is needed too: HTTPS takes a certificate and its key")
        if self.isolate_prefix_cache and not self.has_keys:
            raise ConfigError("isolate_prefix_cache", "tells clients apart by their keys; set api_keys too")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError("root_path", f"must begin and not end with a slash (got {shown(self.root_path)})")

    @property
    def has_keys(self) -> bool:
        """Whether clients must send a key."""
        return bool(self.api_keys or self.urgent_api_keys)

    @property
    def is_loopback(self) -> bool:
        """Whether only programs on this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def scheme(self) -> str:
        return "http" if self.tls_cert_file is None else "https"


_INTEGERS: dict[str, tuple[int, int]] = {
    "port": (0, 65_535),
    "grpc_port": (0, 65_535),
    "max_body_bytes": (1024, 2**40),
    "max_body_values": (2**16, 2**40),
    "max_logprobs": (1024, 2**40),
    "max_header_bytes": (1024, 2**24),
    "max_pending_body_bytes": (1024, 2**50),
    "default_max_new_tokens": (1, 2**31 - 1),
    "max_requests_per_client": (1, 10**7),
    "max_connections": (1, 10**6),
    "keep_alive_timeout_s": (1, 86_400),
    "max_image_fetches": (1, 1024),
    "max_grpc_calls": (1, 10**6),
    "max_stored_responses": (0, 10**7),
    "max_stored_response_bytes": (1024, 2**40),
    "seed": (0, 2**63 - 1),
}
_OPTIONAL_INTEGERS = ("grpc_port", "seed", "default_max_new_tokens", "max_requests_per_client", "max_connections")
_SECONDS = (
    "receive_timeout_s",
    "send_timeout_s",
    "request_timeout_s",
    "queue_timeout_s",
    "step_timeout_s",
    "drain_timeout_s",
    "ping_interval_s",
    "stream_idle_timeout_s",
)
_TEXTS = ("host", "root_path", "log_format", "log_level", "compute_process")
_OPTIONAL_TEXTS = ("tls_cert_file", "tls_key_file", "otlp_endpoint")
_LISTS = (
    "api_keys",
    "urgent_api_keys",
    "trusted_proxies",
    "cors_origins",
    "allowed_hosts",
    "allowed_image_hosts",
    "served_model_names",
)
_CHOICES = {"log_format": LOG_FORMATS, "log_level": LOG_LEVELS, "compute_process": COMPUTE_PROCESSES}


def _check_texts(config: ServerConfig) -> None:
    _check_kinds(config)
    for name in ("api_keys", "urgent_api_keys"):
        if not all(key.isascii() and key.isprintable() and " " not in key for key in getattr(config, name)):
            raise ConfigError(name, "must be printable ASCII without spaces: keys are sent in a header")
    for proxy in config.trusted_proxies:
        _check_proxy(proxy)
    for origin in config.cors_origins:
        if origin != "*" and _ORIGIN.fullmatch(origin) is None:
            raise ConfigError(
                "cors_origins", f"{shown(origin)} is not an origin; write https://app.example, no slash, or *"
            )
    for name in config.allowed_hosts:
        if name != "*" and _HOST_NAME.fullmatch(name) is None:
            raise ConfigError(
                "allowed_hosts", f"{shown(name)} is not a name; write vision.example, without a port, or *"
            )
    if config.otlp_endpoint is not None and not config.otlp_endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            "otlp_endpoint", f"{shown(config.otlp_endpoint)} is not an http(s) URL; give the complete URL"
        )


def _check_proxy(proxy: str) -> None:
    try:
        ipaddress.ip_network(proxy)
    except ValueError:
        remedy = "give one such as 10.0.0.7, or a network such as 10.0.0.0/8"
        raise ConfigError("trusted_proxies", f"{shown(proxy)} is not an IP address or network; {remedy}") from None


def _check_kinds(config: ServerConfig) -> None:
    for name in _LISTS:
        value = getattr(config, name)
        if not isinstance(value, tuple) or not all(isinstance(item, str) and item.strip() for item in value):
            raise ConfigError(name, "must be a tuple of texts, none of them empty")
    for name in (*_TEXTS, *_OPTIONAL_TEXTS):
        value = getattr(config, name)
        is_optional = name in _OPTIONAL_TEXTS
        if not isinstance(value, str) and not (is_optional and value is None):
            raise ConfigError(name, f"must be text (got {shown(value)})")


def _check_numbers(config: ServerConfig) -> None:
    for name, (low, high) in _INTEGERS.items():
        value = getattr(config, name)
        if value is None and name in _OPTIONAL_INTEGERS:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(name, f"must be an integer from {low} to {high} (got {shown(value)})")
    for name in _SECONDS:
        value = getattr(config, name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not 0.01 <= value <= 1e6:
            raise ConfigError(name, f"must be a number of seconds from 0.01 to 1e+06 (got {shown(value)})")
    for f in fields(config):
        if f.type == "bool" and not isinstance(getattr(config, f.name), bool):
            raise ConfigError(f.name, f"must be True or False (got {shown(getattr(config, f.name))})")


def _check_exposure(config: ServerConfig) -> None:
    host = config.host
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if _HOST_NAME.fullmatch(host) is None:
            raise ConfigError(
                "host", f"{shown(host)} is not an address; give one such as 127.0.0.1 or 0.0.0.0"
            ) from None
    if not config.is_loopback and not config.has_keys and not config.insecure:
        raise ConfigError(
            "host",
            f"{host} can be reached from other machines and no API key is set; "
            "set --api-key (KESTREL_API_KEY), or say --insecure",
        )
