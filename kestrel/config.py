"""Runtime configuration: frozen, inert data. Nothing is downloaded, probed or opened here."""

from __future__ import annotations

import os
import re
import string
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from kestrel.errors import ConfigError, shown

DTYPES = ("auto", "float32", "bfloat16", "float16")
DTYPE_ALIASES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
QUANTIZATIONS = ("none", "fp8", "fp8-experts")
KV_CACHE_DTYPES = ("auto", "bf16", "bfloat16", "fp8")
ATTENTION_BACKENDS = ("auto", "triton", "sdpa", "flashinfer")
TOOL_PARSERS = ("hermes", "llama3", "mistral")
FEW_CORES = 4


def setting(default: Any, text: str, *, is_shown: bool = True, **extra: Any) -> Any:
    """A field of a configuration, with its help and whatever else its flag is made from. `is_shown`: in its repr."""
    return field(default=default, repr=is_shown, metadata={"help": text, **extra})


def required(text: str, **extra: Any) -> Any:
    """One that has to be given."""
    return field(metadata={"help": text, **extra})


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """How one engine runs one model. Every field is also a CLI flag."""

    model: str | None = setting(
        None,
        "A name that `kestrel models` lists, or a repository of the hub as org/name. It is downloaded unless "
        "--model-path is given. Default: kestrel-tiny, which comes with the package and knows drawn scenes only.",
        group="Model",
        common=True,
    )
    revision: str | None = setting(
        None,
        "Commit, tag or branch of the named model on the hub. Default: the commit that `kestrel models` shows; for "
        "text models, the branch main as it is now.",
    )
    model_path: str | os.PathLike[str] | None = setting(
        None,
        "A model folder, a single weights file, or a .gguf file.",
        flags=("--model-path", "--weights"),
        common=True,
    )
    weights_path: str | os.PathLike[str] | None = setting(None, "Another name for model_path.", flags=())
    tokenizer_path: str | os.PathLike[str] | None = setting(None, "tokenizer.json to use with a single weights file.")
    chat_template: str | os.PathLike[str] | None = setting(
        None, "A jinja file that formats conversations, for a text model. Default: the model's own template."
    )
    tool_parser: str | None = setting(
        None,
        "How a text model calls tools: hermes, llama3 or mistral. Default: the format that its chat template writes; "
        "if there is none, tools are refused.",
    )
    device: str = setting("auto", "auto, cpu, cuda or cuda:N. auto uses a GPU if there is one.", common=True)
    tensor_parallel_size: int = setting(
        1,
        "Processes that share the model: each has a part of every layer. On GPUs each process has its own GPU, "
        "beginning with the first one; on a CPU they share the cores.",
    )
    dtype: Any = setting(
        "auto", "auto, float32, bfloat16 or float16. auto: bfloat16 on a GPU, float32 on a CPU.", group="Numbers"
    )
    quantization: str = setting(
        "none",
        "none, fp8 (matrices of vision, dense text blocks and experts in float8) or fp8-experts (only the experts). "
        "float8 needs a GPU of compute capability 8.9 or later.",
    )
    kv_cache_dtype: str = setting(
        "auto", "Number format of the KV cache: auto (the model's dtype), bf16, or fp8 (half the memory; GPU only)."
    )
    attention_backend: str = setting(
        "auto",
        "auto, triton or sdpa. auto: Triton kernels on a GPU that can run them, else torch's own attention (sdpa), "
        "which runs without fused operations and CUDA graphs. flashinfer is not available yet.",
    )
    max_batch_size: int = setting(16, "Sequences that run at the same time.", group="Batches and KV cache")
    max_seq_length: int | None = setting(
        None, "Longest prompt plus answer in tokens. Default: the model's own context."
    )
    page_size: int = setting(16, "Positions per KV cache page.")
    kv_cache_pages: int | None = setting(None, "Pages in the KV cache. Default: calculated from free memory.")
    kv_cache_memory_fraction: float | None = setting(
        None,
        "Without kv_cache_pages, the KV cache takes at most this share of the memory that weights and steps leave "
        "free. Default: 0.8 on a GPU, 0.25 on a CPU.",
    )
    refiner_path: str | os.PathLike[str] | None = setting(
        None,
        "Weights of the segmentation refiner; without them segment returns the model's own outline.",
        group="Model",
    )
    adapter_dir: str | os.PathLike[str] | None = setting(
        None, "A folder of adapters; files may be added, changed and removed while the engine runs.", group="Adapters"
    )
    adapter_url_template: str | None = setting(
        None, "Where to download adapters from, such as https://example.org/adapters/{id}.safetensors."
    )
    adapter_cache_dir: str | os.PathLike[str] | None = setting(
        None, "Where downloaded adapters are kept. Default: kestrel/adapters in the user's cache folder."
    )
    adapter_cache_bytes: int = setting(
        20 * 2**30,
        "Disk space for downloaded adapters, in bytes, with those being downloaded; the least recently used are "
        "removed.",
    )
    max_adapters: int = setting(4, "Adapters that are on the device at the same time.")
    max_adapter_rank: int = setting(64, "Largest rank of an adapter; memory for it is reserved.")
    adapter_memory_bytes: int = setting(2 * 2**30, "Host memory for loaded adapters, in bytes.")
    enable_prefix_cache: bool = setting(
        True, "Reuse the KV of repeated images, prompts and earlier answers.", group="Batches and KV cache"
    )
    max_prefill_tokens: int | None = setting(
        None,
        "Most prompt positions in one step, so that running streams are not held up. Default: 2048; on a GPU 4096 "
        "with a max_batch_size of 16 or more, and 6144 with 64 or more if the model reads pictures.",
        group="Steps and queue",
    )
    streaming_prefill_tokens: int | None = setting(
        None,
        "Most prompt positions in one step while an answer is streamed. Pictures are then encoded in slices, so that "
        "tokens come evenly; on a CPU they always are. With 0 pictures are encoded whole, and max_prefill_tokens is "
        "the only limit. Default: 768 on a GPU, 256 on a CPU.",
    )
    vision_batch_crops: int | None = setting(
        None,
        "Crops of pictures that are encoded together. Default: 72 on a GPU, fewer if it has little memory; 16 on a "
        "CPU.",
    )
    max_queue_size: int = setting(1024, "Most requests beyond `max_batch_size`; further ones are refused.")
    max_queue_tokens: int | None = setting(
        None, "Most prompt tokens of waiting requests; further requests are refused. Default: no limit."
    )
    priority_ageing_s: float = setting(5.0, "Seconds of waiting that count as much as one priority level.")
    enable_cuda_graphs: bool = setting(
        True, "Run steps as CUDA graphs; the usual ones are captured at the start. No effect on a CPU."
    )
    compile: bool = setting(False, "Compile the model with torch.compile (not available yet: refused when set).")
    honour_exif_orientation: bool = setting(
        True, "Turn pictures upright by their EXIF tag. The reference implementation ignores the tag.", group="Pictures"
    )
    max_image_pixels: int = setting(100_000_000, "Largest picture in pixels, read from its header before decoding.")
    max_image_bytes: int = setting(64 * 2**20, "Largest encoded picture in bytes.")
    max_pending_image_bytes: int = setting(
        4 * 2**30, "Most memory for pictures of unanswered requests, in bytes; further ones are refused."
    )
    image_work_bytes: int = setting(
        2 * 2**30,
        "Memory for decoding and resizing pictures, in bytes, calculated from their headers; a picture waits until "
        "it fits.",
    )
    recent_image_bytes: int = setting(
        64 * 2**20,
        "Memory for decoded pictures and their small files, in bytes, so that a file sent again is not decoded again.",
    )
    image_threads: int | None = setting(
        None,
        "Threads that decode pictures; pictures above 16.8 megapixels have separate threads. Default: half the number "
        "of cores, from 2 to 8.",
    )

    def __post_init__(self) -> None:
        _check_sources(self)
        _check_url_template(self.adapter_url_template)
        _check_numbers(self)
        _check_device(self.device)
        if self.tensor_parallel_size > 1 and self.device.startswith("cuda:"):
            raise ConfigError(
                "device", f"{self.device!r} names one GPU, and tensor_parallel_size asks for more; use cuda"
            )
        normalise_dtype(self.dtype)
        _check_choices(self)
        _check_quantization(self)
        if self.compile:
            raise ConfigError("compile", "torch.compile is not available in this version; leave it out")

    @property
    def weights(self) -> Path | None:
        """The local model folder or weights file, if one was given."""
        source = self.model_path if self.model_path is not None else self.weights_path
        return None if source is None else _expanded(source)

    @property
    def dtype_name(self) -> str:
        return normalise_dtype(self.dtype)

    @property
    def kv_cache_dtype_name(self) -> str:
        """ "auto", "bfloat16" or "fp8"."""
        return DTYPE_ALIASES.get(self.kv_cache_dtype, self.kv_cache_dtype)

    @property
    def refiner_file(self) -> Path | None:
        return None if self.refiner_path is None else _expanded(self.refiner_path)

    @property
    def adapter_folder(self) -> Path | None:
        return None if self.adapter_dir is None else _expanded(self.adapter_dir)

    @property
    def adapter_cache_folder(self) -> Path | None:
        return None if self.adapter_cache_dir is None else _expanded(self.adapter_cache_dir)

    @property
    def chat_template_file(self) -> Path | None:
        return None if self.chat_template is None else _expanded(self.chat_template)

    @property
    def tokenizer_file(self) -> Path | None:
        return None if self.tokenizer_path is None else _expanded(self.tokenizer_path)


def _expanded(path: str | os.PathLike[str]) -> Path:
    """`~` is the home folder where there is one; unlike Path.expanduser, an unknown user is no error here."""
    return Path(os.path.expanduser(path))


def normalise_dtype(value: Any) -> str:
    """ "bfloat16" from "bf16", "torch.bfloat16" or the torch dtype itself."""
    name = str(value).removeprefix("torch.").lower()
    name = DTYPE_ALIASES.get(name, name)
    if name not in DTYPES:
        raise ConfigError("dtype", f"{shown(value)} is not supported; use one of: {', '.join(DTYPES)}")
    return name


# ---------------------------------------------------------------------- what fields may hold


def _check_choices(config: RuntimeConfig) -> None:
    for name, known in (
        ("quantization", QUANTIZATIONS),
        ("kv_cache_dtype", KV_CACHE_DTYPES),
        ("attention_backend", ATTENTION_BACKENDS),
    ):
        value = getattr(config, name)
        if not isinstance(value, str) or value not in known:
            raise ConfigError(name, f"{shown(value)} is not supported; use one of: {', '.join(known)}")
    if config.tool_parser is not None and config.tool_parser not in TOOL_PARSERS:
        problem = f"{shown(config.tool_parser)} is not known; use one of: {', '.join(TOOL_PARSERS)}"
        raise ConfigError("tool_parser", problem)
    if config.attention_backend == "flashinfer":
        raise ConfigError("attention_backend", "flashinfer is not available in this version; use auto")


def _check_quantization(config: RuntimeConfig) -> None:
    if config.quantization != "none" and config.attention_backend == "sdpa":
        raise ConfigError(
            "quantization",
            f"{config.quantization!r} runs on Triton kernels, which attention_backend='sdpa' forbids; "
            "leave one of the two out",
        )


PATHS = (
    "model_path", "weights_path", "tokenizer_path", "chat_template", "refiner_path", "adapter_dir", "adapter_cache_dir",
)  # fmt: skip


def _check_sources(config: RuntimeConfig) -> None:
    if config.model_path is not None and config.weights_path is not None:
        raise ConfigError("weights_path", "is another name for model_path; give only one of them")
    for name in PATHS:
        value = getattr(config, name)
        if value is not None and not isinstance(value, (str, os.PathLike)):
            raise ConfigError(name, f"must be a path (got {shown(value)})")
    _check_revision(config.revision)
    if config.revision is not None and config.weights is not None:
        raise ConfigError("revision", "is for models of the hub, and model_path names files; leave one of the two out")
    if config.model is not None and (not isinstance(config.model, str) or not config.model.strip()):
        raise ConfigError("model", f"must be a registered model name (got {shown(config.model)}); see `kestrel models`")


_ADAPTER_PLACEHOLDERS = ("id", "finetune_id", "step")


def _check_url_template(template: Any) -> None:
    if template is None:
        return
    form = "write it as https://example.org/adapters/{id}.safetensors, or with {finetune_id} and {step}"
    if not isinstance(template, str) or not template.startswith(("https://", "http://")):
        raise ConfigError("adapter_url_template", f"must be a URL (got {shown(template)}); {form}")
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError("adapter_url_template", f"has unbalanced braces ({error}); {form}") from None
    names = [name for _, name, _, _ in parts if name is not None]
    plain = all(not spec and conversion is None for _, name, spec, conversion in parts if name is not None)
    if not plain or not set(names) <= set(_ADAPTER_PLACEHOLDERS) or not {"id", "finetune_id"} & set(names):
        raise ConfigError("adapter_url_template", f"has the placeholders {names}; {form}")
    if "{" in template.split("/", 3)[2]:
        raise ConfigError("adapter_url_template", f"must not have placeholders in its host; {form}")


def _check_revision(revision: Any) -> None:
    if revision is None:
        return
    is_sound = isinstance(revision, str) and re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._/-]{0,199}", revision) is not None
    if not is_sound or ".." in revision:
        raise ConfigError(
            "revision", f"must be a commit, tag or branch (got {shown(revision)}), as the page of the model lists them"
        )


_RANGES: dict[str, tuple[float, float]] = {
    "tensor_parallel_size": (1, 64),
    "max_batch_size": (1, 4096),
    "page_size": (1, 1024),
    "max_adapters": (1, 1024),
    "max_adapter_rank": (1, 4096),
    "adapter_memory_bytes": (1, 2**50),
    "adapter_cache_bytes": (1, 2**50),
    "max_prefill_tokens": (1, 2**20),
    "streaming_prefill_tokens": (0, 2**20),
    "max_queue_size": (1, 10**7),
    "vision_batch_crops": (1, 4096),
    "max_queue_tokens": (1, 2**40),
    "max_image_pixels": (1, 2**31),
    "max_image_bytes": (1, 2**40),
    "max_pending_image_bytes": (1, 2**50),
    "image_work_bytes": (2**20, 2**50),
    "recent_image_bytes": (0, 2**50),
    "image_threads": (1, 256),
    "max_seq_length": (2, 2**20),
    "kv_cache_pages": (2, 2**31 - 1),
}


def _check_numbers(config: Any) -> None:
    for name, (low, high) in _RANGES.items():
        value = getattr(config, name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(name, f"must be an integer from {low} to {high} (got {shown(value)})")
    for name, low, high in (("kv_cache_memory_fraction", 0.01, 0.98), ("priority_ageing_s", 0.001, 1e6)):
        value = getattr(config, name)
        if value is None and name == "kv_cache_memory_fraction":
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise ConfigError(name, f"must be a number from {low} to {high} (got {shown(value)})")
    for f in fields(config):
        if f.type == "bool" and not isinstance(getattr(config, f.name), bool):
            raise ConfigError(f.name, f"must be True or False (got {shown(getattr(config, f.name))})")


def _check_device(device: Any) -> None:
    valid = isinstance(device, str) and (
        device in ("auto", "cpu", "cuda") or re.fullmatch(r"cuda:[0-9]{1,3}", device) is not None
    )
    if not valid:
        raise ConfigError("device", f"{shown(device)} is not supported; use auto, cpu, cuda or cuda:N")


# ---------------------------------------------------------------------- environment variables

PREFIX = "KESTREL_"
TRUTHS = {
    **dict.fromkeys(("1", "true", "t", "yes", "y", "on"), True),
    **dict.fromkeys(("0", "false", "f", "no", "n", "off"), False),
}
"""How truth values are written, in any case; the command line takes the same words."""


def flag_names(field: Field[Any]) -> tuple[str, ...]:
    """Every spelling of a field's flag; a boolean's opposite is not among them."""
    return tuple(field.metadata.get("flags", ("--" + field.name.replace("_", "-"),)))


def environment_names(field: Field[Any]) -> list[str]:
    """By each of its flags, then by its own name, as files have it; none without a flag."""
    flags = [name.removeprefix("--").replace("-", "_") for name in flag_names(field)]
    return [PREFIX + name.upper() for name in dict.fromkeys([*flags, field.name] if flags else ())]


def spin_briefly() -> None:
    """Before torch is imported. Threads that share a product wait for each other, and torch's OpenMP (libgomp) lets
    them spin 300000 times for that: where another program has the core of one of them, a small product takes
    milliseconds. With 1000 times a calm machine of two cores takes 5 to 13 % longer. More cores were not measured, and
    keep libgomp's own number."""
    if "OMP_WAIT_POLICY" not in os.environ and (os.cpu_count() or 1) <= FEW_CORES:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def runtime_config_from(environment: Mapping[str, str]) -> RuntimeConfig:
    """The configuration that the variables describe. One that is empty counts as not set."""
    given = {
        field.name: _value(field, name, environment[name])
        for field in fields(RuntimeConfig)
        for name in reversed(environment_names(field))
        if environment.get(name)
    }
    return RuntimeConfig(**given)


def _value(field: Field[Any], name: str, text: str) -> Any:
    kind = str(field.type).removesuffix(" | None")
    try:
        if kind in ("int", "float"):
            return int(text) if kind == "int" else float(text)
        return TRUTHS[text.lower()] if kind == "bool" else text
    except (ValueError, KeyError):
        wanted = {"int": "a whole number", "float": "a number", "bool": "true or false"}[kind]
        raise ConfigError(name, f"must be {wanted} (got {shown(text)})") from None
