"""Measured block sizes as files, a table per GPU: shipped in `tables/`, or left in a user's cache by `kestrel tune`."""
