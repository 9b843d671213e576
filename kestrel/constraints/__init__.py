"""Structured answers: the formats a request may ask for, their limits, and how they become masks over a vocabulary."""

from kestrel.constraints.formats import ResponseFormat, response_format

__all__ = ["ResponseFormat", "response_format"]
