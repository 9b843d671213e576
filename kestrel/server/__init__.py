"""The HTTP server: a thin front end over one engine. `kestrel.server.http.create_app` makes the application."""
