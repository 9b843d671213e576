"""Plain Python calls, without an event loop: `kestrel.vl()` over an engine of one's own or a server."""
