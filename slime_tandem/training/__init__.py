"""From scored samples to new weights: rows, metrics, the update."""
