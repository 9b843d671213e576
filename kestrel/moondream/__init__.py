"""The Moondream family."""
