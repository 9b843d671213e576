"""Judging a model on held-out scenes."""
