"""Who takes part in a run, their servers, and a rollout by them."""
