"""The web playground: one static page that tries every skill of the server it comes from."""
