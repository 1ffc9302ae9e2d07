"""What is needed to start slime's train.py with this package: sizes, layout, memory, flags (docs/scaling.md)."""
