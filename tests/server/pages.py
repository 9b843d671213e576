"""Reading a metrics page the way Prometheus does."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

VLLM_NAMES = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:lora_requests_info": "gauge",
    "vllm:cache_config_info": "gauge",
}


class Page:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        families = list(text_string_to_metric_families(text))
        self.types = {family.name: family.type for family in families}
        self.samples = [sample for family in families for sample in family.samples]
        self.sample_names = {sample.name for sample in self.samples}

    def value(self, name: str, **labels: str) -> float:
        """The one sample of this name with at least these labels."""
        (sample,) = [s for s in self.samples if s.name == name and labels.items() <= s.labels.items()]
        return sample.value

    def total(self, name: str, **labels: str) -> float:
        return sum(s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items())
