"""Paged KV bookkeeping: a page pool, a radix prefix cache over it, and leases as the only door. No tensors."""

from kestrel.cache.manager import CacheManager, CacheMisuse, CacheStats, PageLease

__all__ = ["CacheManager", "CacheMisuse", "CacheStats", "PageLease"]
