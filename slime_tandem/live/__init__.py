"""The live page of a run: a web server on a loopback address that follows the run's folder."""
