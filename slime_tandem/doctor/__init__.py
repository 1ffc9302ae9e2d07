"""`slime-tandem doctor`: questions put to a team of the user's own models, each with a remedy (docs/objective.md)."""
