"""A load generator for the HTTP server: a ramp of stages, their statistics, and a page that compares runs."""
