"""Where adapters come from: a folder, the hosted service, any web server, or several of them in order."""

from kestrel.adapters.sources.configured import (
    API_KEY_VARIABLE,
    SourceChain,
    configured_sources,
    given_key,
    has_adapter_source,
)
from kestrel.adapters.sources.downloads import DownloadLimits
from kestrel.adapters.sources.folder import FolderSource
from kestrel.adapters.sources.remote import HostedSource, UrlTemplateSource
from kestrel.adapters.sources.source import AdapterCopy, AdapterListing, AdapterSource

__all__ = [
    "API_KEY_VARIABLE",
    "AdapterCopy",
    "AdapterListing",
    "AdapterSource",
    "DownloadLimits",
    "FolderSource",
    "HostedSource",
    "SourceChain",
    "UrlTemplateSource",
    "configured_sources",
    "given_key",
    "has_adapter_source",
]
