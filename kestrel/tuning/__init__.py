"""Measured block sizes as files: one table per GPU, shipped in `tables/` or made by `kestrel tune` in the user's cache."""
