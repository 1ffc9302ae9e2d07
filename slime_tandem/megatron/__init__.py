"""A policy, its weights, its checkpoints: the only room, beside slime_hooks, that imports Megatron-core."""
