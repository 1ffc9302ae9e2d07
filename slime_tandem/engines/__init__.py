"""Engines: the wire records, a client, an embedded server, and how servers are started and stopped."""
