"""Paged KV bookkeeping: a page pool, a radix prefix cache over it, and leases as the only door. No tensors."""

from kestrel.cache.manager import CacheManager, CacheStats, PageLease
from kestrel.cache.radix import CacheMisuse

__all__ = ["CacheManager", "CacheMisuse", "CacheStats", "PageLease"]
