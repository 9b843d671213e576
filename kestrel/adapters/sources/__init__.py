"""Where adapters come from: a folder, the hosted service, any web server, or several of them in order."""

from kestrel.adapters.sources.chain import SourceChain
from kestrel.adapters.sources.configured import configured_sources
from kestrel.adapters.sources.downloads import DownloadLimits
from kestrel.adapters.sources.folder import FolderSource
from kestrel.adapters.sources.hosted import HostedSource
from kestrel.adapters.sources.source import AdapterCopy, AdapterListing, AdapterSource
from kestrel.adapters.sources.url_template import UrlTemplateSource

__all__ = [
    "AdapterCopy",
    "AdapterListing",
    "AdapterSource",
    "DownloadLimits",
    "FolderSource",
    "HostedSource",
    "SourceChain",
    "UrlTemplateSource",
    "configured_sources",
]
