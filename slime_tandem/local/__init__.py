"""The local runtime: tasks, models, a Megatron-core trainer on one machine, the run loop."""
