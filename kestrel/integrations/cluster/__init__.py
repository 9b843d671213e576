"""Several engines behind one server, apart from what carries the messages between them: `kestrel.integrations.ray`."""
