"""The folder of a model: what is in it, how it is read, made and fetched. Starts no server."""
