"""Kestrel: an open inference engine for vision-language and text models."""

__version__ = "0.1.0"
