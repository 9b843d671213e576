"""The engine's numbers as Prometheus metrics, read when someone scrapes and at no other time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kestrel.engine import EngineSnapshot

MODEL = "model_name"


class EngineGauges(Collector):
    """Own names, and the vLLM names that dashboards and the Kubernetes inference gateway know."""

    def __init__(self, model_name: str, snapshot: Callable[[], EngineSnapshot]) -> None:
        self._model_name = model_name
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        taken = self._snapshot()
        yield from self._own(taken)
        yield from self._of_adapters(taken)
        yield from self._as_vllm(taken)

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not ask an engine that is still starting."""
        return iter(())

    def _own(self, taken: EngineSnapshot) -> Iterator[Metric]:
        yield self._gauge("kestrel_requests_running", "Requests that hold a row of the batch.", taken.num_running)
        yield self._gauge("kestrel_requests_waiting", "Accepted requests that hold none.", taken.num_waiting)
        yield self._gauge("kestrel_max_batch_size", "Requests that can run at the same time.", taken.max_batch_size)
        yield self._gauge("kestrel_kv_pages", "Pages of the KV cache.", taken.num_pages)
        yield self._gauge("kestrel_kv_pages_used", "Pages that running requests hold.", taken.num_used_pages)
        yield self._gauge("kestrel_kv_pages_cached", "Pages that hold a reusable prefix.", taken.num_cached_pages)
        yield self._gauge("kestrel_kv_page_positions", "Positions per page.", taken.page_size)
        yield self._counter(
            "kestrel_kv_pages_evicted", "Cached pages given up for other requests.", taken.evicted_pages_total
        )
        yield self._counter(
            "kestrel_preemptions", "Running requests sent back to the queue for want of pages.", taken.preemptions_total
        )

    def _of_adapters(self, taken: EngineSnapshot) -> Iterator[Metric]:
        yield self._gauge("kestrel_adapter_slots", "Adapters that can be in use at once.", taken.num_adapter_slots)
        yield self._gauge("kestrel_adapters_running", "Adapters in use.", len(taken.running_adapters))
        yield self._gauge("kestrel_adapters_waiting", "Adapters that wait for a slot.", len(taken.waiting_adapters))
        yield self._gauge("kestrel_adapters_kept", "Adapters in the host's memory.", taken.num_kept_adapters)
        yield self._counter(
            "kestrel_adapter_slot_loads", "Adapters copied to the device.", taken.adapter_slot_loads_total
        )
        yield self._counter("kestrel_adapter_loads", "Adapters read from files.", taken.adapter_loads_total)
        yield self._counter(
            "kestrel_adapter_load_failures", "Adapters that could not be used.", taken.adapter_load_failures_total
        )
        yield self._counter(
            "kestrel_adapter_load_seconds", "Seconds spent on reads and downloads.", taken.adapter_load_seconds_total
        )

    def _as_vllm(self, taken: EngineSnapshot) -> Iterator[Metric]:
        yield self._gauge("vllm:num_requests_running", "Requests that hold a row of the batch.", taken.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Accepted requests that hold none.", taken.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", taken.kv_usage)
        yield self._counter(
            "vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", taken.prefix_query_tokens_total
        )
        yield self._counter(
            "vllm:prefix_cache_hits", "Tokens found in the prefix cache.", taken.prefix_hit_tokens_total
        )
        yield self._counter("vllm:num_preemptions", "Requests sent back to the queue.", taken.preemptions_total)
        yield self._labelled(
            "vllm:cache_config_info",
            "The KV cache; always 1.",
            {"block_size": str(taken.page_size), "num_gpu_blocks": str(taken.num_pages)},
            1.0,
        )
        yield self._labelled(
            "vllm:lora_requests_info",
            "Adapters in use; the value is the time of the reading.",
            {
                "max_lora": str(taken.num_adapter_slots),
                "running_lora_adapters": ",".join(taken.running_adapters),
                "waiting_lora_adapters": ",".join(taken.waiting_adapters),
            },
            time.time(),
        )

    def _gauge(self, name: str, help_text: str, value: float) -> Metric:
        return self._labelled(name, help_text, {}, value)

    def _labelled(self, name: str, help_text: str, labels: dict[str, str], value: float) -> Metric:
        family = GaugeMetricFamily(name, help_text, labels=[MODEL, *labels])
        family.add_metric([self._model_name, *labels.values()], value)
        return family

    def _counter(self, name: str, help_text: str, value: float) -> Metric:
        """Exposed under `name` with `_total` appended."""
        family = CounterMetricFamily(name, help_text, labels=[MODEL])
        family.add_metric([self._model_name], value)
        return family
