"""Where adapters come from: a folder, the hosted service, any web server, or several of them in order."""

from kestrel.adapters.sources.configured import (
    API_KEY_VARIABLE,
    SourceChain,
    configured_sources,
    given_key,
    has_adapter_source,
)
from kestrel.adapters.sources.folder import FolderSource
from kestrel.adapters.sources.source import AdapterCopy, AdapterListing, AdapterSource

__all__ = [
    "API_KEY_VARIABLE",
    "AdapterCopy",
    "AdapterListing",
    "AdapterSource",
    "FolderSource",
    "SourceChain",
    "configured_sources",
    "given_key",
    "has_adapter_source",
]
