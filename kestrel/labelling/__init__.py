"""Whole folders of pictures and videos, labelled by an engine or a server: sources, a durable job, formats, review."""
