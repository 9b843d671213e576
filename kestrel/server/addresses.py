"""Which addresses of the internet may be fetched from: public ones, and nothing that leads elsewhere in disguise."""

from __future__ import annotations

import ipaddress

_GLOBAL_IPV6 = ipaddress.ip_network("2000::/3")


def is_public(address: str) -> bool:
    """False for private, loopback, link-local, shared, multicast, reserved and unspecified addresses.

    IPv6 forms that carry an IPv4 address (mapped, compatible, 6to4, Teredo, NAT64) are refused whatever they carry;
    of the rest only 2000::/3 has ever been given out for the public.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if parsed.is_multicast or parsed.is_reserved or parsed.is_unspecified or not parsed.is_global:
        return False
    if isinstance(parsed, ipaddress.IPv6Address):
        return parsed in _GLOBAL_IPV6 and not _carries_ipv4(parsed)
    return True


def _carries_ipv4(address: ipaddress.IPv6Address) -> bool:
    carried = (address.ipv4_mapped, address.sixtofour, address.teredo)
    return any(c is not None for c in carried)
