"""A run's folder, and everything that a person reads of it."""
