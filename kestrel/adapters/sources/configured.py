"""From a configuration to the sources it asks for."""

from __future__ import annotations

from kestrel.adapters.sources.cache_folder import CacheFolder
from kestrel.adapters.sources.chain import SourceChain
from kestrel.adapters.sources.disk_cache import default_cache_folder
from kestrel.adapters.sources.folder import FolderSource
from kestrel.adapters.sources.hosted import HostedSource
from kestrel.adapters.sources.source import AdapterSource
from kestrel.adapters.sources.url_template import UrlTemplateSource
from kestrel.config import RuntimeConfig


def configured_sources(config: RuntimeConfig, api_key: str | None = None) -> SourceChain:
    """The folder first, then the URL template, then, with a key, the hosted service. Sweeps the cache folder."""
    cache_folder, max_bytes = config.adapter_cache_folder or default_cache_folder(), config.adapter_cache_bytes
    sources: list[AdapterSource] = []
    if config.adapter_folder is not None:
        sources.append(FolderSource(config.adapter_folder))
    if config.adapter_url_template is not None:
        sources.append(UrlTemplateSource(config.adapter_url_template, cache_folder, max_cache_bytes=max_bytes))
    if api_key:
        sources.append(HostedSource(api_key, cache_folder, max_cache_bytes=max_bytes))
    chain = SourceChain(sources)
    if chain.downloads:
        CacheFolder(cache_folder, max_bytes).sweep()
    return chain
