"""The engine inside other servers' worlds, and their protocols over the engine."""
