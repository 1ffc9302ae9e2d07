"""`slime-tandem doctor`: sanity probes on the user's own config and models, each with a remedy (docs/objective.md)."""
