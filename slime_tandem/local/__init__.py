"""The loop on one machine: the top of a run, known to the command line and the launcher alone."""
