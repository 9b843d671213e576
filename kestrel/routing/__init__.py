"""Which of several engines gets a request: the one that knows its picture or the beginning of its prompt, while it has
room. Pure bookkeeping, for clusters and for the simulator."""

from kestrel.routing.prefixes import PrefixKeys, prefix_keys
from kestrel.routing.router import ContentRouter, ReplicaLoad

__all__ = ["ContentRouter", "PrefixKeys", "ReplicaLoad", "prefix_keys"]
