"""The HTTP server: one engine, any number of clients."""
