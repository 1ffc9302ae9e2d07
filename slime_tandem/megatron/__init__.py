"""The only rooms, beside slime_hooks, that import Megatron-core: a policy, its weights, its checkpoints."""
