"""Structured answers: the formats a request may ask for, their limits, and how they become masks over a vocabulary."""

from kestrel.constraints.formats import ResponseFormat, closed, response_format

__all__ = ["ResponseFormat", "closed", "response_format"]
