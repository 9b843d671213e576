"""The web playground: one static page that tries every skill of the server it comes from."""

from kestrel.server.playground.routes import router

__all__ = ["router"]
