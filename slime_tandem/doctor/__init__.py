"""`slime-tandem doctor`: questions put to a team on the user's own config and models, each with a remedy (docs/objective.md)."""
